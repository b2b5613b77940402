"""What a request for text says, whichever way it asks: fields, sampling, and what is refused."""

"""Load generator and reports for language-model servers. A client: it imports nothing of the server."""

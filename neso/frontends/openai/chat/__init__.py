"""Chat completions: messages to prompt, and generated text to message."""

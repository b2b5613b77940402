"""Logits processors: Python callables, registered by name, that change the logits of requests which choose them."""

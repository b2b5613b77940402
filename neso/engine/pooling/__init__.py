"""Pooling of token embeddings to one embedding per text."""

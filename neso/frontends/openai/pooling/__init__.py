"""Embeddings, scores and re-ranking."""

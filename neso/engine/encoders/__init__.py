"""Encoder models: embeddings of texts and scores of text pairs, computed without KV cache in one step per request."""

"""Encoder models: embeddings of texts and scores of pairs, without KV cache, one step per request."""

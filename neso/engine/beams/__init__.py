"""Beam search on forks of the paged KV cache."""

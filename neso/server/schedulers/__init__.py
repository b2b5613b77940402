"""Schedulers: dynamic batching and sequence batching."""

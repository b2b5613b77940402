"""Requests that are executed together, for backends that concatenate them."""

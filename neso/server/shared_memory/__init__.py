"""Tensors in memory that clients and the server share."""

"""Shared memory between clients and the server."""

"""Endpoints: how requests of each protocol are built and their responses are read."""

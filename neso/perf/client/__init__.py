"""Connections, worker processes, and the run as a whole."""

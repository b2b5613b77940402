"""Prometheus metrics of the server, its models and the machine."""

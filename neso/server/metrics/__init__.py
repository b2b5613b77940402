"""Prometheus metrics of the server, the models and the machine."""

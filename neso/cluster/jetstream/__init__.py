"""Servers that share workers: queue and discovery in NATS JetStream, messages over core NATS."""

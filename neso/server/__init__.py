"""The server's core: models, their requests and responses. Front ends and backends are built on it."""

"""The server core: models, requests and responses. Frontends and backends are built on it."""

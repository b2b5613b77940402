"""Backends. Each module or package implements `neso.server.backend.Backend` for one `backend` name."""

"""Model families. Each function reads a config.json and returns a spec; `specs/registry.py` lists them."""

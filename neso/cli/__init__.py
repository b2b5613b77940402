"""The `neso` command."""

"""Model repositories that `neso repo init` writes."""

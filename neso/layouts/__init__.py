"""Model repository templates of `neso repo init`."""

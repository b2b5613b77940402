"""Models that are made of other models."""

from neso.backends.ensemble.backend import EnsembleBackend

__all__ = ["EnsembleBackend"]

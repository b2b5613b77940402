"""Models that ship inside the package."""

from pathlib import Path

SHIPPED_MODELS = {"neso-pilot": Path(__file__).parent / "neso-pilot"}
"""Name → directory of the checkpoint."""

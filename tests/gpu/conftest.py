"""Make the helpers of the engine tests importable."""

from __future__ import annotations

import sys
from pathlib import Path

_ENGINE = Path(__file__).parents[1] / "engine"
sys.path += [str(_ENGINE), str(_ENGINE / "runners")]

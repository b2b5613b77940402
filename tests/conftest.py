"""Where there is no GPU, Triton interprets its kernels: that must be said before they are imported."""

from __future__ import annotations

import os

from neso.engine.runners.registry import has_nvidia_gpu

if not has_nvidia_gpu():
    os.environ.setdefault("TRITON_INTERPRET", "1")

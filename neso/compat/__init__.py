"""Runs programs that were written for other servers' Python packages: Triton's `tritonserver` and `tritonfrontend`."""

from __future__ import annotations

import importlib
import importlib.util
import sys

PACKAGES = ("tritonserver", "tritonfrontend")


def install(*, replace: bool = False) -> None:
    """Let `import tritonserver` and `import tritonfrontend` find Neso's, in this process.

    Raises `ImportError` where the real packages are installed, unless they are to be replaced. Idempotent.
    """
    for name in PACKAGES:
        ours = importlib.import_module(f"neso.compat.{name}")
        if sys.modules.get(name) is ours:
            continue
        if not replace and (name in sys.modules or importlib.util.find_spec(name) is not None):
            raise ImportError(f"a package '{name}' is installed, which Neso's would hide", name=name)
        sys.modules[name] = ours

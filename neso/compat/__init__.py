"""Replacements for Triton's Python packages `tritonserver` and `tritonfrontend`."""

from __future__ import annotations

import importlib
import importlib.util
import sys

PACKAGES = ("tritonserver", "tritonfrontend")


def install(*, replace: bool = False) -> None:
    """Make `import tritonserver` and `import tritonfrontend` resolve to Neso's modules in this process.

    Raises `ImportError` if the real packages are installed, unless `replace` is true. Idempotent.
    """
    for name in PACKAGES:
        replacement = importlib.import_module(f"neso.compat.{name}")
        if sys.modules.get(name) is replacement:
            continue
        if not replace and (name in sys.modules or importlib.util.find_spec(name) is not None):
            raise ImportError(f"a package '{name}' is installed, which Neso's would hide", name=name)
        sys.modules[name] = replacement

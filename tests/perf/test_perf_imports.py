"""The load generator is a client: it loads nothing of the server, and no package that only the server needs."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import importlib, pkgutil, sys
import neso.cli.perf, neso.perf
for module in pkgutil.walk_packages(neso.perf.__path__, "neso.perf."):
    importlib.import_module(module.name)
print(*sys.modules)
"""
SERVER = ("neso.backends", "neso.compat", "neso.frontends", "neso.layouts", "neso.server")
PACKAGES = (
    "PIL",
    "gguf",
    "llguidance",
    "onnxruntime",
    "pydantic",
    "starlette",
    "torch",
    "transformers",
    "zmq",
)


def test_the_client_imports_nothing_of_the_server():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    modules = done.stdout.split()
    assert "neso.perf.client.grpc" in modules
    assert not [name for name in modules if name.startswith((*SERVER, "neso.engine.client", "neso._native"))]
    assert not {name.partition(".")[0] for name in modules} & set(PACKAGES)

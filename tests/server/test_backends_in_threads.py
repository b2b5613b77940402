"""Concurrent imports of backends by several threads, as at server start."""

from __future__ import annotations

import subprocess
import sys

FIND_AT_ONCE = """
import sys, threading, time
import numpy
import neso.generation
from neso.server.backend import find_backend

class Slow:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == "neso.backends.llm":  # whose lock is held meanwhile, and which the other backend needs
            searching.set()
            time.sleep(2)

def find(name):
    try:
        find_backend(name)
    except BaseException as error:
        failed.append(f"{name}: {error!r}")

sys.meta_path.insert(0, Slow)
searching, failed = threading.Event(), []
first = threading.Thread(target=find, args=("llm",))
first.start()
searching.wait()
find("embedding")
first.join()
sys.exit(chr(10).join(failed) or 0)
"""


def test_backends_with_mutual_imports() -> None:
    """In separate processes, since imports cannot be undone."""
    for _ in range(3):
        found = subprocess.run(
            [sys.executable, "-c", FIND_AT_ONCE], capture_output=True, text=True, timeout=60
        )
        assert found.returncode == 0, found.stderr

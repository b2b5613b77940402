"""The base install stays small and without torch; `bench/install_size.py` installs it into a fresh environment.

The extensions are not compiled again, which takes minutes: the installation of this environment has compiled them.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[1] / "bench" / "install_size.py"


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_base_install_is_under_300_mb_without_torch():
    result = subprocess.run([sys.executable, BENCH, "--without-compiling"], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr

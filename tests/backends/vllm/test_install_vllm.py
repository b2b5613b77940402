"""Commands in the environment that scripts/install_vllm.py creates."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[3] / "scripts" / "install_vllm.py"


def test_environment_has_the_neso_command(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("install_vllm", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    (tmp_path / "bin" / "python").chmod(0o755)
    module.add_commands(tmp_path)
    shown = subprocess.run([tmp_path / "bin" / "neso", "--help"], capture_output=True, text=True, check=True)
    assert "serve" in shown.stdout

"""The backend of docs/guides/backends.md, installed as a separate package and served."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from server_process import ServerProcess

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "backends.md"
FILE = re.compile(r"^`([^`\n]+)`:\n\n^```\w+\n(.*?)^```$", re.M | re.S)
PROGRAM = re.compile(r"(?<!`:\n\n)^```python\n(.*?)^```$", re.M | re.S)
ENTRY_POINT = re.compile(r'^\[project\.entry-points\."(.+)"\]\n(\w+) = "(.+)"$', re.M)


def install(folder: Path) -> None:
    """Install the package of the page into a folder."""
    for name, text in FILE.findall(PAGE.read_text()):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    group, name, target = ENTRY_POINT.search((folder / "pyproject.toml").read_text()).groups()
    information = folder / "scale_backend-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: scale-backend\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text(f"[{group}]\n{name} = {target}\n")


@pytest.fixture
def package(tmp_path, monkeypatch):
    """The installed package, and a model."""
    install(tmp_path)
    (tmp_path / "models" / "scaled" / "1").mkdir()
    np.save(tmp_path / "models" / "scaled" / "1" / "factor.npy", np.float32(3))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    return tmp_path


def test_documentation_example(package):
    (program,) = PROGRAM.findall(PAGE.read_text())
    with ServerProcess(f"--model-repository={package / 'models'}") as server:
        program = program.replace("localhost:8000", server.address("http"))
        result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=110)
        assert result.returncode == 0, result.stderr
        expected = re.search(r"# (\[\[.*\]\])", program)[1]
        assert result.stdout.strip() == expected == "[[4. 7.]]"
        assert server.get("/v2/models/scaled")[1].count(b'"platform":"scale"') == 1
    assert server.stop() == 0


def test_settings_and_errors(package):
    """`--backend-config` is passed to it; if the package cannot be imported, its models are unavailable."""
    config = package / "models" / "scaled" / "config.pbtxt"
    config.write_text(config.read_text().split("parameters")[0])
    arguments = (f"--model-repository={package / 'models'}", "--backend-config=scale,offset=10")
    with ServerProcess(*arguments) as server:
        body = {"inputs": [{"name": "IN", "shape": [1, 2], "datatype": "FP32", "data": [1, 2]}]}
        status, response = server.post("/v2/models/scaled/infer", body)
        assert status == 200 and response["outputs"][0]["data"] == [13, 16]
    (package / "scale_backend.py").write_text("import package_that_is_not_there")
    with ServerProcess(*arguments, "--exit-on-error=false", "--strict-readiness=false") as server:
        status, (entry,) = server.post("/v2/repository/index", {})
        assert (
            entry["reason"] == "unable to load backend 'scale': No module named 'package_that_is_not_there'"
        )

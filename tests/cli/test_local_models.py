"""`neso models`, `neso pull` and `neso doctor`."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from neso.cli import doctor
from neso.cli.main import app


def cached_model(cache: Path, name: str, files: dict[str, str]) -> None:
    """Write a model as the hub's client stores it."""
    folder = cache / f"models--{name.replace('/', '--')}"
    snapshot = folder / "snapshots" / "abc"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("abc")
    (folder / "blobs").mkdir()
    snapshot.mkdir(parents=True)
    for number, (file, text) in enumerate(files.items()):
        (folder / "blobs" / str(number)).write_text(text)
        (snapshot / file).symlink_to(folder / "blobs" / str(number))


@pytest.mark.slow
def test_shipped_and_cached_models_are_listed(tmp_path: Path) -> None:
    cache = tmp_path / "hub"
    llama = {
        "config.json": json.dumps({"architectures": ["LlamaForCausalLM"]}),
        "model.safetensors": "x" * 999,
    }
    cached_model(cache, "org/llama", llama)
    cached_model(cache, "org/bert", {"config.json": json.dumps({"architectures": ["BertModel"]})})
    cached_model(cache, "org/odd", {"config.json": "[]"})
    command = [sys.executable, "-m", "neso.cli", "models", "--json", "--url=http://127.0.0.1:9"]
    environment = {**os.environ, "HF_HOME": str(tmp_path)}
    printed = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    report = json.loads(printed)
    assert report["served"] is None
    local = {model["name"]: model for model in report["local"]}
    assert (local["neso-pilot"]["source"], local["neso-pilot"]["runs"]) == ("ships with Neso", "llm")
    assert (local["org/llama"]["runs"], local["org/llama"]["source"]) == ("llm", "hub cache")
    assert local["org/llama"]["size"] > 999
    assert (local["org/bert"]["runs"], local["org/odd"]["runs"]) == ("embedding", "unknown")


def test_pull_says_why_it_failed() -> None:
    result = CliRunner().invoke(app, ["pull", "/no/such/model"])
    assert result.exit_code == 1
    assert "neso pull: /no/such/model" in result.output


def test_pull_prints_the_place_and_what_runs_the_model() -> None:
    result = CliRunner().invoke(app, ["pull", "neso-pilot"])
    assert result.exit_code == 0
    assert "LlamaForCausalLM, runs on llm" in result.output


def test_doctor_reports_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    result = CliRunner().invoke(app, ["doctor", "--no-speed"])
    assert result.exit_code == 0, result.output
    topics = {line[2:12].strip() for line in result.output.splitlines()}
    assert {"neso", "cpu", "features", "kernels", "runner", "gpu", "memory", "ports", "extra"} <= topics


def test_doctor_fails_without_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("neso.engine.host_resources.available_memory", lambda: 10**8)
    result = CliRunner().invoke(app, ["doctor", "--no-speed"])
    assert result.exit_code == 1
    assert "! memory     0.1 GB available" in result.output


def test_doctor_names_used_ports(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as used:
        used.bind(("127.0.0.1", 0))
        used.listen()
        monkeypatch.setattr(doctor, "_PORTS", {used.getsockname()[1]: "KServe HTTP"})
        (finding,) = doctor._ports()
    assert finding.text.startswith("in use: ") and "(KServe HTTP)" in finding.text

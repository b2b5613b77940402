"""From model names to directories, without a network."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.utils import filter_repo_objects

from neso.engine.weights.hub import _DOWNLOAD_PATTERNS, _IGNORE_PATTERNS, ModelNotFound, resolve_model


def test_local_directory(tmp_path: Path) -> None:
    assert resolve_model(tmp_path) == tmp_path
    assert resolve_model(str(tmp_path)) == tmp_path


@pytest.mark.parametrize(
    "name", ["/no/such/directory", "./absent", "~/absent-model", "a/b/c", "", "org/name?x"]
)
def test_invalid_hub_names_are_not_looked_up(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: pytest.fail("looked up"))
    with pytest.raises(ModelNotFound, match="no such directory"):
        resolve_model(name)


def test_hub_name_is_downloaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    requested: list[Any] = []

    def download(name: str, **options: Any) -> str:
        requested.append((name, options["revision"]))
        assert "*.bin" not in options["allow_patterns"]
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert resolve_model("org/model-1.5B", revision="main") == tmp_path
    assert requested == [("org/model-1.5B", "main")]


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (huggingface_hub.errors.LocalEntryNotFoundError("x"), "cannot be reached"),
        (huggingface_hub.errors.OfflineModeIsEnabled("x"), "cannot be reached"),
        (ConnectionError("refused"), "refused"),
    ],
)
def test_hub_errors(monkeypatch: pytest.MonkeyPatch, error: Exception, message: str) -> None:
    def download(*_: Any, **__: Any) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(ModelNotFound, match=message):
        resolve_model("org/model")


def test_download_patterns() -> None:
    files = ["model.safetensors", "1_Pooling/config.json", "2_Dense/model.safetensors", "onnx/config.json"]
    files += ["consolidated.safetensors", "original/params.json", "openvino/model.safetensors"]
    expected = filter_repo_objects(files, allow_patterns=_DOWNLOAD_PATTERNS, ignore_patterns=_IGNORE_PATTERNS)
    assert list(expected) == files[:3]

"""Checkpoint directories: single-file, sharded and invalid."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from neso.engine.weights.checkpoint import Checkpoint
from neso.engine.weights.source import CheckpointError

Factory = Callable[..., Path]


@pytest.fixture
def single(llama_checkpoint: Path, tmp_path: Path) -> Path:
    """A copy that tests may modify."""
    return shutil.copytree(llama_checkpoint, tmp_path / "single")


@pytest.fixture
def sharded(checkpoint_factory: Factory, tmp_path: Path) -> Path:
    return shutil.copytree(checkpoint_factory("llama", max_shard_size="60KB"), tmp_path / "sharded")


def edit_index(directory: Path, change: Callable[[dict[str, Any]], object]) -> None:
    path = directory / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    change(index)
    path.write_text(json.dumps(index))


def test_sharded_equals_single(single: Path, sharded: Path) -> None:
    assert len(list(sharded.glob("model-*.safetensors"))) > 2
    with Checkpoint(single) as one, Checkpoint(sharded) as many:
        assert sorted(one.names()) == sorted(many.names())
        for name in one.names():
            np.testing.assert_array_equal(one.tensor(name), many.tensor(name))
    assert one.config["model_type"] == "llama"
    assert one.generation_config["eos_token_id"] == 1


def test_generation_config_is_optional(single: Path) -> None:
    (single / "generation_config.json").unlink()
    with Checkpoint(single) as checkpoint:
        assert checkpoint.generation_config == {}


def test_missing_tensor_and_wrong_shape(single: Path) -> None:
    with Checkpoint(single) as checkpoint:
        assert "model.norm.weight" in checkpoint
        assert "model.norm.bias" not in checkpoint
        with pytest.raises(CheckpointError, match=r"model\.norm\.bias"):
            checkpoint.tensor("model.norm.bias")
        with pytest.raises(CheckpointError, match=r"model\.norm\.weight.*\[48\].*\[49\]"):
            checkpoint.tensor("model.norm.weight", (49,))


def test_integer_weights_are_rejected(single: Path) -> None:
    from safetensors.numpy import save_file

    save_file({"w": np.ones((2, 2), np.int8)}, single / "model.safetensors")
    with Checkpoint(single) as checkpoint, pytest.raises(CheckpointError, match="int8"):
        checkpoint.read_float32("w", np.empty((2, 2), np.float32))


@pytest.mark.parametrize(
    ("file", "content", "defect"),
    [
        ("config.json", None, "config.json: cannot be read"),
        ("config.json", b"{", "config.json: invalid JSON"),
        ("config.json", b"\xff", "config.json: invalid JSON"),
        ("config.json", b"[]", "config.json: not a JSON object"),
        ("generation_config.json", b"nope", "generation_config.json: invalid JSON"),
        ("model.safetensors", None, "neither model.safetensors nor"),
        ("model.safetensors", b"", "model.safetensors: 0 bytes"),
    ],
)
def test_invalid_files(single: Path, file: str, content: bytes | None, defect: str) -> None:
    if content is None:
        (single / file).unlink()
    else:
        (single / file).write_bytes(content)
    with pytest.raises(CheckpointError, match=defect):
        Checkpoint(single)


def test_no_directory(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="absent"):
        Checkpoint(tmp_path / "absent")


def test_missing_shard_is_named(sharded: Path) -> None:
    shard = sorted(sharded.glob("model-*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(CheckpointError, match=shard.name):
        Checkpoint(sharded)


@pytest.mark.parametrize("shard", ["../outside.safetensors", "/etc/passwd", "", ".", "..", 5, None])
def test_shards_outside_the_directory_are_rejected(sharded: Path, shard: Any) -> None:
    edit_index(sharded, lambda index: index["weight_map"].update({"model.norm.weight": shard}))
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight"):
        Checkpoint(sharded)


def test_index_with_a_tensor_missing_in_all_shards(sharded: Path) -> None:
    edit_index(
        sharded,
        lambda index: index["weight_map"].update({"phantom": index["weight_map"]["model.norm.weight"]}),
    )
    with pytest.raises(CheckpointError, match="phantom"):
        Checkpoint(sharded)


@pytest.mark.parametrize("weight_map", [None, {}, [], "x"])
def test_index_without_weight_map(sharded: Path, weight_map: Any) -> None:
    edit_index(sharded, lambda index: index.update(weight_map=weight_map))
    with pytest.raises(CheckpointError, match="weight_map"):
        Checkpoint(sharded)

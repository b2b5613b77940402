"""Safetensors files: every dtype, and every kind of defect."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from neso.engine.weights.safetensors_file import SafetensorsFile
from neso.engine.weights.source import CheckpointError, copy_as_float32

ENTRY = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}
SECOND = {"dtype": "U8", "shape": [4], "data_offsets": [24, 28]}


def write(path: Path, header: Any, data: bytes) -> Path:
    encoded = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(encoded).to_bytes(8, "little") + encoded + data)
    return path


@pytest.mark.parametrize(
    "dtype",
    [
        "float64",
        "float32",
        "float16",
        "bfloat16",
        "float8_e4m3fn",
        "float8_e5m2",
        "int64",
        "int8",
        "uint8",
        "bool",
    ],
)
def test_values_of_each_dtype(tmp_path: Path, dtype: str) -> None:
    values = (torch.randn(3, 5) * 3).to(getattr(torch, dtype))
    save_file(
        {"w": values, "empty": torch.empty(0, 4), "scalar": torch.tensor(7.5)}, tmp_path / "f.safetensors"
    )
    file = SafetensorsFile(tmp_path / "f.safetensors")
    assert sorted(file.names()) == ["empty", "scalar", "w"]
    found = file.tensor("w")
    assert not found.flags.writeable
    np.testing.assert_array_equal(found.astype(np.float64), values.double().numpy())
    assert file.tensor("empty").shape == (0, 4)
    assert file.tensor("scalar") == 7.5


def test_tensors_outlive_close(tmp_path: Path) -> None:
    file = SafetensorsFile(write(tmp_path / "f", {"w": ENTRY}, np.arange(6, dtype=np.float32).tobytes()))
    tensor = file.tensor("w")
    file.close()
    assert tensor.tolist() == [[0, 1, 2], [3, 4, 5]]
    with pytest.raises(CheckpointError, match="closed"):
        file.tensor("w")


def test_unaligned_data_is_read(tmp_path: Path) -> None:
    header = json.dumps({"w": ENTRY}).encode()
    header += b" " * (3 - len(header) % 4)
    file = SafetensorsFile(write(tmp_path / "f", header, np.arange(6, dtype=np.float32).tobytes()))
    assert file.tensor("w").ravel().tolist() == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("header", "data", "defect"),
    [
        (b"{", b"", "invalid JSON"),
        (b"\xff\xfe", b"", "invalid JSON"),
        (b"[" * 100_000, b"", "invalid JSON"),
        (b"[]", b"", "not a JSON object"),
        (b'{"a": {}, "a": {}}', b"", "duplicate name 'a'"),
        ({"w": 5}, b"", "'w'"),
        ({"w": {}}, b"", "unknown dtype None"),
        ({"w": {**ENTRY, "dtype": "F7"}}, bytes(24), "unknown dtype 'F7'"),
        ({"w": {**ENTRY, "dtype": ["F32"]}}, bytes(24), "unknown dtype"),
        ({"w": {**ENTRY, "shape": [-2, -3]}}, bytes(24), "invalid shape"),
        ({"w": {**ENTRY, "shape": [2.0, 3]}}, bytes(24), "invalid shape"),
        ({"w": {**ENTRY, "shape": 6}}, bytes(24), "invalid shape"),
        ({"w": {**ENTRY, "data_offsets": [0]}}, bytes(24), "invalid data_offsets"),
        ({"w": {**ENTRY, "data_offsets": [-24, 0]}}, bytes(24), "invalid data_offsets"),
        ({"w": {**ENTRY, "data_offsets": [0, True]}}, bytes(24), "invalid data_offsets"),
        ({"w": {**ENTRY, "data_offsets": [0, 20]}}, bytes(24), "takes 24 bytes"),
        ({"w": {**ENTRY, "data_offsets": [24, 0]}}, bytes(24), "takes 24 bytes"),
        ({"w": {**ENTRY, "shape": [1 << 62, 8]}}, bytes(24), "takes"),
        ({"w": ENTRY}, bytes(23), "truncated"),
        ({"w": {**ENTRY, "data_offsets": [1 << 70, (1 << 70) + 24]}}, bytes(24), "truncated"),
        ({"w": ENTRY}, bytes(25), "belong to none"),
        ({"w": ENTRY, "v": {**SECOND, "data_offsets": [22, 26]}}, bytes(26), "'v' overlaps"),
        ({"w": ENTRY, "v": {**SECOND, "data_offsets": [26, 30]}}, bytes(30), "'v' leaves a gap"),
    ],
)
def test_invalid_header(tmp_path: Path, header: Any, data: bytes, defect: str) -> None:
    path = write(tmp_path / "broken.safetensors", header, data)
    with pytest.raises(CheckpointError, match=defect) as caught:
        SafetensorsFile(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    "content", [b"", b"1234567", bytes(8), (1 << 40).to_bytes(8, "little") + b"{}", b"\xff" * 64]
)
def test_files_of_other_formats(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        SafetensorsFile(path)


def test_every_truncation_is_detected(tmp_path: Path) -> None:
    whole = write(tmp_path / "whole", {"w": ENTRY, "v": SECOND}, bytes(range(28))).read_bytes()
    path = tmp_path / "cut"
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(CheckpointError):
            SafetensorsFile(path)


@pytest.mark.parametrize("name", ["absent", "."])
def test_unreadable_file(tmp_path: Path, name: str) -> None:
    with pytest.raises(CheckpointError, match="cannot be read"):
        SafetensorsFile(tmp_path / name)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_conversion_of_all_16_bit_values(dtype: Any) -> None:
    values = np.arange(1 << 16, dtype=np.uint16).view(dtype)
    target = np.empty(1 << 16, np.float32)
    copy_as_float32(values, target)
    kind = torch.bfloat16 if dtype is ml_dtypes.bfloat16 else torch.float16
    expected = torch.from_numpy(values.view(np.int16)).view(kind).float().numpy()
    np.testing.assert_array_equal(target, expected)

"""Reading GGUF files: files written by `GGUFWriter`, and invalid files."""

from __future__ import annotations

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from gguf import GGUFWriter
from gguf_files import finish
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from neso.engine.weights.gguf.file import GGUFFile
from neso.engine.weights.source import CheckpointError

TENSOR = np.arange(12, dtype=np.float32).reshape(3, 4)


def string(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def pair(key: bytes, kind: int, value: bytes) -> bytes:
    return string(key) + struct.pack("<I", kind) + value


def entry(name: bytes, *dimensions: int, kind: int = 0, offset: int = 0) -> bytes:
    sizes = struct.pack(f"<I{len(dimensions)}Q", len(dimensions), *dimensions)
    return string(name) + sizes + struct.pack("<IQ", kind, offset)


def whole(
    *parts: bytes, version: int = 3, tensors: int = 0, pairs: int = 0, data: bytes = b"", alignment: int = 32
) -> bytes:
    """Return a handwritten file, for content that the package's writer rejects."""
    header = b"GGUF" + struct.pack("<IQQ", version, tensors, pairs) + b"".join(parts)
    return header + b"\0" * (-len(header) % alignment) + data


def open_bytes(tmp_path: Path, content: bytes) -> GGUFFile:
    path = tmp_path / "file.gguf"
    path.write_bytes(content)
    return GGUFFile(path)


@pytest.fixture
def written(tmp_path: Path) -> Path:
    writer = GGUFWriter(tmp_path / "written.gguf", "llama")
    writer.add_uint8("u8", 255)
    writer.add_int8("i8", -3)
    writer.add_uint16("u16", 65535)
    writer.add_int16("i16", -30000)
    writer.add_uint32("u32", 2**32 - 1)
    writer.add_int32("i32", -(2**31))
    writer.add_uint64("u64", 2**63)
    writer.add_int64("i64", -(2**63))
    writer.add_float32("f32", 0.5)
    writer.add_float64("f64", 0.1)
    writer.add_bool("yes", True)
    writer.add_string("text", "мир 👋")
    writer.add_array("texts", ["a", "", "ß"])
    writer.add_array("counts", [1, 2, 3])
    writer.add_tensor("dense", TENSOR)
    writer.add_tensor("half", TENSOR.astype(np.float16))
    writer.add_tensor(
        "quantized", gguf.quants.quantize(np.ones((2, 64), np.float32), Type.Q8_0), raw_dtype=Type.Q8_0
    )
    return finish(writer)


def test_values_of_every_type(written: Path) -> None:
    metadata = GGUFFile(written).metadata
    integers = {"u8": 255, "i8": -3, "u16": 65535, "i16": -30000, "u32": 2**32 - 1, "i32": -(2**31)}
    for key, value in {**integers, "u64": 2**63, "i64": -(2**63)}.items():
        assert metadata.integer(key) == value
    assert metadata.number("f32") == 0.5 and metadata.number("f64") == 0.1
    assert metadata.boolean("yes") is True
    assert metadata.string("text") == "мир 👋"
    assert metadata.strings("texts") == ["a", "", "ß"]
    counts = metadata.numbers("counts", 3)
    assert counts is not None and counts.tolist() == [1, 2, 3]
    assert metadata.numbers("none", 3) is None
    assert metadata.integer("none", 7) == 7


@pytest.mark.parametrize(
    ("read", "message"),
    [
        (lambda m: m.integer("none"), "'none' is missing"),
        (lambda m: m.integer("text"), "'text' must be an integer"),
        (lambda m: m.integer("yes"), "'yes' must be an integer"),
        (lambda m: m.integer("counts"), "'counts' differs between layers"),
        (lambda m: m.positive("i8"), "'i8' must be positive, not -3"),
        (lambda m: m.number("texts"), "'texts' must be a number, not an array of 3"),
        (lambda m: m.boolean("u8"), "'u8' must be true or false"),
        (lambda m: m.string("u8"), "'u8' must be a string, not 255"),
        (lambda m: m.strings("counts"), "'counts' must be an array of strings"),
        (lambda m: m.numbers("counts", 4), "'counts' must be an array of 4 numbers"),
    ],
)
def test_values_of_another_type(written: Path, read, message: str) -> None:
    with pytest.raises(CheckpointError, match=rf"written\.gguf.*{message}"):
        read(GGUFFile(written).metadata)


def test_tensors_are_views(written: Path) -> None:
    file = GGUFFile(written)
    assert list(file.names()) == ["dense", "half", "quantized"]
    np.testing.assert_array_equal(file.tensor("dense"), TENSOR)
    assert file.tensor("half").dtype == np.float16
    assert file.entry("quantized").shape == (2, 64)
    assert file.tensor("quantized").shape == (2, 2 * 34)
    view = file.tensor("dense")
    assert view.base is not None and not view.flags.writeable
    file.close()
    np.testing.assert_array_equal(view, TENSOR)
    with pytest.raises(CheckpointError, match="closed"):
        file.tensor("dense")
    with pytest.raises(CheckpointError, match="no tensor 'other'"):
        file.entry("other")


def test_version_2_and_another_alignment(tmp_path: Path) -> None:
    content = whole(
        pair(b"general.alignment", 4, struct.pack("<I", 64)),
        entry(b"a", 1),
        entry(b"b", 1, offset=64),
        version=2,
        tensors=2,
        pairs=1,
        data=struct.pack("<f60xf", 1.0, 2.0),
        alignment=64,
    )
    file = open_bytes(tmp_path, content)
    assert file.tensor("a").tolist() == [1.0] and file.tensor("b").tolist() == [2.0]


BROKEN: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "does not begin with 'GGUF'"),
    "another format": (b"PK\x03\x04" + b"\0" * 50, "does not begin with 'GGUF'"),
    "version 1": (whole(version=1), "GGUF version 1"),
    "big-endian": (whole(version=0x03000000), "big-endian"),
    "no counts": (b"GGUF\x03\0\0\0\x01", "number of tensors extends beyond the end"),
    "too many pairs": (whole(pairs=2**60)[:24], "key 0 .*beyond the end"),
    "too many tensors": (whole(tensors=2**60)[:24], "tensor 0 .*beyond the end"),
    "long key": (whole(struct.pack("<Q", 2**63), pairs=1), "beyond the end"),
    "key twice": (whole(pair(b"k", 0, b"1"), pair(b"k", 0, b"2"), pairs=2), "'k' is duplicated"),
    "key no UTF-8": (whole(pair(b"\xff", 0, b"1"), pairs=1), "key 0 .*UTF-8"),
    "value no UTF-8": (whole(pair(b"k", 8, string(b"\xff")), pairs=1), "'k' is not valid UTF-8"),
    "item no UTF-8": (
        whole(pair(b"k", 9, struct.pack("<IQ", 8, 1) + string(b"\xff")), pairs=1),
        "'k' contains invalid UTF-8",
    ),
    "unknown value": (whole(pair(b"k", 99, b"12345678"), pairs=1), "'k' has the unknown type 99"),
    "unknown items": (
        whole(pair(b"k", 9, struct.pack("<IQ", 77, 1)), pairs=1),
        "'k' has the unknown type 77",
    ),
    "nested": (whole(pair(b"k", 9, struct.pack("<IQ", 9, 1)), pairs=1), "'k' is an array of arrays"),
    "long array": (whole(pair(b"k", 9, struct.pack("<IQ", 4, 2**62)), pairs=1), "'k' extends beyond the end"),
    "many strings": (
        whole(pair(b"k", 9, struct.pack("<IQ", 8, 2**62)), pairs=1),
        "'k' extends beyond the end",
    ),
    "long string": (
        whole(pair(b"k", 9, struct.pack("<IQQ", 8, 1, 2**63)), pairs=1),
        "'k' extends beyond the end",
    ),
    "alignment": (
        whole(pair(b"general.alignment", 4, struct.pack("<I", 12)), pairs=1),
        "multiple of 8, not 12",
    ),
    "alignment zero": (whole(pair(b"general.alignment", 4, b"\0" * 4), pairs=1), "multiple of 8, not 0"),
    "tensor twice": (whole(entry(b"t", 1), entry(b"t", 1), tensors=2), "'t' is duplicated"),
    "no dimensions": (whole(entry(b"t"), tensors=1), "'t': 0 dimensions"),
    "many dimensions": (whole(entry(b"t", 1, 1, 1, 1, 1), tensors=1), "'t': 5 dimensions"),
    "type IQ2_XS": (
        whole(entry(b"t", 256, kind=17), tensors=1),
        "'t' has the type IQ2_XS.*supported are F32",
    ),
    "type 1000": (whole(entry(b"t", 1, kind=1000), tensors=1), "'t' has the type number 1000"),
    "part of a block": (
        whole(entry(b"t", 48, 2, kind=8), tensors=1),
        "'t': rows of 48 .*Q8_0's blocks of 32",
    ),
    "offset": (whole(entry(b"t", 1, offset=4), tensors=1, data=b"\0" * 8), "'t': offset 4 is not aligned"),
    "truncated": (whole(entry(b"t", 8), tensors=1, data=b"\0" * 31), "'t' ends at byte 32 of 31"),
    "no data": (whole(entry(b"t", 2**40, 2**40), tensors=1), "'t' ends at byte"),
    "overlap": (
        whole(entry(b"a", 16), entry(b"b", 1, offset=32), tensors=2, data=b"\0" * 64),
        "'b' overlaps the tensor before it",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_invalid_files(tmp_path: Path, case: str) -> None:
    content, defect = BROKEN[case]
    with pytest.raises(CheckpointError, match=rf"file\.gguf: .*{defect}"):
        open_bytes(tmp_path, content)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"absent.*No such file"):
        GGUFFile(tmp_path / "absent.gguf")


@settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(data=st.data())
def test_corruption_raises_only_checkpoint_error(written: Path, tmp_path: Path, data: st.DataObject) -> None:
    """Truncating or overwriting bytes raises no error other than `CheckpointError`."""
    content = bytearray(written.read_bytes())
    for _ in range(data.draw(st.integers(0, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    try:
        file = open_bytes(tmp_path, bytes(content[: data.draw(st.integers(0, len(content)))]))
        for name in file.names():
            file.tensor(name).sum()
    except CheckpointError as error:
        assert "file.gguf" in str(error)

"""Decoding of prompt embeddings, and files made to exhaust the server."""

import base64
import io
import os
import pickle
import struct
import tracemalloc
import zipfile
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from neso.frontends.openai.prompt_embeds import decode_embeddings

ROWS = np.arange(24, dtype=np.float32).reshape(6, 4)


def encode(data: bytes) -> str:
    return base64.b64encode(data).decode()


def numpy_file(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def numpy_header(shape: str, descr: str = "<f4") -> bytes:
    header = f"{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header


def torch_zip(metadata: bytes, storages: dict[str, bytes]) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("archive/data.pkl", metadata)
        for name, content in storages.items():
            archive.writestr(f"archive/data/{name}", content)
    return file.getvalue()


def global_(module: str, name: str) -> bytes:
    return b"c" + f"{module}\n{name}\n".encode()


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value)) + value.encode()


def number(value: int) -> bytes:
    return b"J" + struct.pack("<i", value)


def tensor(key: str, count: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> bytes:
    """Return opcodes that push one tensor, as torch.save writes them."""
    storage = (
        b"(" + text("storage") + global_("torch", "FloatStorage") + text(key) + text("cpu") + number(count)
    )
    sizes = b"(" + b"".join(map(number, shape)) + b"t"
    steps = b"(" + b"".join(map(number, strides)) + b"t"
    rest = b"\x89" + global_("collections", "OrderedDict") + b")R"
    return (
        global_("torch._utils", "_rebuild_tensor_v2")
        + b"("
        + storage
        + b"tQ"
        + number(0)
        + sizes
        + steps
        + rest
        + b"tR"
    )


def test_tensor_of_torch_is_read() -> None:
    torch = pytest.importorskip("torch")
    for rows in (torch.from_numpy(ROWS), torch.from_numpy(ROWS).T, torch.from_numpy(ROWS)[1:3].half()):
        file = io.BytesIO()
        torch.save(rows, file)
        np.testing.assert_array_equal(decode_embeddings(encode(file.getvalue())), rows.numpy())


def test_opcodes_of_a_tensor_are_read() -> None:
    data = torch_zip(b"\x80\x02" + tensor("0", 24, (6, 4), (4, 1)) + b".", {"0": ROWS.tobytes()})
    np.testing.assert_array_equal(decode_embeddings(encode(data)), ROWS)


@pytest.mark.parametrize("order", ["C", "F"])
def test_array_of_numpy_is_read(order: str) -> None:
    array = np.asarray(ROWS, order=order)  # type: ignore[call-overload]
    np.testing.assert_array_equal(decode_embeddings(encode(numpy_file(array))), ROWS)


def peak_of(decode: Callable[[], object]) -> int:
    """Return the peak of the memory that is allocated during a call that must raise `ValueError`."""
    tracemalloc.start()
    try:
        with pytest.raises(ValueError):
            decode()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


SIZE = 1 << 20


def many_tensors_of_one_storage() -> bytes:
    one = tensor("0", SIZE // 4, (SIZE // 4,), (1,))
    return torch_zip(b"\x80\x02(" + one * 15 + b"t.", {"0": bytes(SIZE)})


def many_reads_of_one_storage() -> bytes:
    storage = (
        b"("
        + text("storage")
        + global_("torch", "FloatStorage")
        + text("0")
        + text("cpu")
        + number(1)
        + b"tQ"
    )
    return torch_zip(b"\x80\x02(" + storage * 60 + b"t.", {"0": bytes(SIZE)})


def large_memo_index() -> bytes:
    return torch_zip(b"\x80\x02Nr" + struct.pack("<I", 1 << 27) + b".", {})


def many_zip_entries() -> bytes:
    return torch_zip(b"\x80\x02N.", {str(number): b"" for number in range(20_000)})


def large_bytearray() -> bytes:
    return torch_zip(b"\x80\x05\x96" + struct.pack("<Q", 1 << 32) + b".", {})


def array_with_state() -> bytes:
    """A pickle that gives an array another state, of 2^27 objects."""
    shape = b"(" + number(1 << 27) + b"t"
    state = b"(" + number(1) + shape + global_("torch", "FloatStorage") + b"\x89]t"
    return torch_zip(b"\x80\x02" + tensor("0", 24, (6, 4), (4, 1)) + state + b"b.", {"0": ROWS.tobytes()})


@pytest.mark.parametrize(
    "bomb",
    [
        many_tensors_of_one_storage,
        many_reads_of_one_storage,
        large_memo_index,
        many_zip_entries,
        large_bytearray,
        array_with_state,
    ],
)
def test_memory_is_bounded_by_the_file(bomb: Callable[[], bytes]) -> None:
    data = bomb()
    encoded = encode(data)
    assert peak_of(lambda: decode_embeddings(encoded)) < 6 * len(data) + (1 << 20)


@pytest.mark.parametrize(
    "shape", ["(1099511627776,)", "(4611686018427387904, 0)", "(-2, -3)", "(1,)" * 2, "-" * 900 + "1"]
)
def test_array_of_another_size_than_the_file_is_rejected(shape: str) -> None:
    data = numpy_header(shape) + bytes(24)
    assert peak_of(lambda: decode_embeddings(encode(data))) < 1 << 20


def test_array_of_objects_is_rejected() -> None:
    with pytest.raises(ValueError, match="not an array"):
        decode_embeddings(encode(numpy_header("(1,)", "|O") + bytes(8)))


def test_encrypted_zip_is_rejected() -> None:
    data = bytearray(torch_zip(b"\x80\x02N.", {}))
    for signature, offset in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        data[data.index(signature) + offset] |= 1
    with pytest.raises(ValueError, match="encrypted"):
        decode_embeddings(encode(bytes(data)))


def test_class_outside_a_tensor_is_rejected() -> None:
    with pytest.raises(ValueError, match="system is not of a dense float tensor"):
        decode_embeddings(encode(torch_zip(pickle.dumps(os.system, 2), {})))


@given(st.data())
def test_changed_files_raise_value_error_only(data: st.DataObject) -> None:
    original = data.draw(st.sampled_from([numpy_file(ROWS), VALID_TORCH]))
    content = bytearray(original)
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    try:
        decoded = decode_embeddings(encode(bytes(content)))
    except ValueError:
        return
    assert decoded.nbytes <= len(content)


VALID_TORCH = torch_zip(b"\x80\x02" + tensor("0", 24, (6, 4), (4, 1)) + b".", {"0": ROWS.tobytes()})

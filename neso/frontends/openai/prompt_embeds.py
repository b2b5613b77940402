"""Decoding of prompt embeddings in JSON bodies.

The files come from clients, so nothing in them is executed, and decoding never takes more memory than a few times the
file: every storage is read once, the sum of the storages is at most the size of the file, and tensors are views.
"""

from __future__ import annotations

import base64
import binascii
import io
import math
import pickle
import pickletools
import zipfile
from collections import OrderedDict
from typing import Any

import ml_dtypes
import numpy as np

from neso.frontends.openai.request_params import Embeddings

_STORAGES = {
    "FloatStorage": np.dtype(np.float32),
    "HalfStorage": np.dtype(np.float16),
    "BFloat16Storage": np.dtype(ml_dtypes.bfloat16),
    "DoubleStorage": np.dtype(np.float64),
}
_MAX_PICKLE = 4096
"""Maximum bytes of the pickled metadata; one tensor has a few hundred bytes. Also bounds the nesting of its values."""
_MAX_ZIP_ENTRIES = 64
"""Maximum number of entries of a zip file; torch.save writes about eight for a tensor."""
_ZIP_ENTRY = b"PK\x01\x02"
"""Signature of an entry in the central directory of a zip file."""
_MAX_NUMPY_HEADER = 1024
_OPCODES = frozenset(
    (
        *("PROTO", "STOP", "GLOBAL", "STACK_GLOBAL", "REDUCE", "BINPERSID", "NONE", "NEWTRUE", "NEWFALSE"),
        *(
            "MARK",
            "TUPLE",
            "TUPLE1",
            "TUPLE2",
            "TUPLE3",
            "EMPTY_TUPLE",
            "EMPTY_LIST",
            "EMPTY_DICT",
            "SETITEM",
        ),
        *(
            "SETITEMS",
            "APPEND",
            "APPENDS",
            "FRAME",
            "MEMOIZE",
            "BINPUT",
            "LONG_BINPUT",
            "BINGET",
            "LONG_BINGET",
        ),
        *("BINUNICODE", "SHORT_BINUNICODE", "BININT", "BININT1", "BININT2", "LONG1"),
    )
)
"""Opcodes in the pickled metadata of a tensor. Others can reserve memory that the file does not have."""


def decode_embeddings(text: str) -> Embeddings:
    """Decode the float tensor in a base64-encoded file of `torch.save` or `numpy.save`.

    torch files are read without torch and without executing pickled code. Raises `ValueError`.
    """
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise ValueError("is not base64") from None
    if data.startswith(b"\x93NUMPY"):
        return _read_numpy(data)
    if not data.startswith(b"PK"):
        raise ValueError("is neither a torch.save nor a numpy.save file")
    try:
        return _read_torch(data)
    except Exception as error:  # invalid zip files and pickles can raise any exception
        raise ValueError(f"is not a tensor saved by torch.save: {error}") from None


def _read_numpy(data: bytes) -> Embeddings:
    """Read a NumPy file without copying its data. Raises `ValueError` if the header does not match the size."""
    file = io.BytesIO(data)
    try:
        version = np.lib.format.read_magic(file)
        read_header = {
            (1, 0): np.lib.format.read_array_header_1_0,
            (2, 0): np.lib.format.read_array_header_2_0,
        }[version]
        shape, fortran_order, dtype = read_header(file, max_header_size=_MAX_NUMPY_HEADER)
        if dtype.hasobject or math.prod(shape) * dtype.itemsize != len(data) - file.tell():
            raise ValueError(f"{len(data) - file.tell()} bytes are not {dtype}{list(shape)}")
        values: Embeddings = np.frombuffer(data, dtype, offset=file.tell())
        return values.reshape(shape, order="F" if fortran_order else "C")
    except Exception as error:  # the header is a Python literal, which can raise many exceptions
        raise ValueError(f"is not an array saved by numpy.save: {error}") from None


def _read_torch(data: bytes) -> Embeddings:
    if data.count(_ZIP_ENTRY) > _MAX_ZIP_ENTRIES:
        raise ValueError(f"has more than {_MAX_ZIP_ENTRIES} entries")
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        if any(entry.compress_type != zipfile.ZIP_STORED for entry in archive.infolist()):
            raise ValueError("is compressed, unlike files of torch.save")
        metadata = next((name for name in archive.namelist() if name.endswith("/data.pkl")), None)
        if metadata is None or archive.getinfo(metadata).file_size > _MAX_PICKLE:
            raise ValueError("is not a tensor saved by torch.save")
        tensor = _Unpickler(archive, metadata.removesuffix("data.pkl"), len(data)).load()
    if not isinstance(tensor, np.ndarray):
        raise ValueError(f"contains a {type(tensor).__name__}, not a tensor")
    return tensor.copy()


class _Unpickler(pickle.Unpickler):
    """Unpickles a dense float tensor; rejects any other class. All storages together have at most `max_bytes`."""

    def __init__(self, archive: zipfile.ZipFile, folder: str, max_bytes: int) -> None:
        metadata = archive.read(folder + "data.pkl")
        _check_opcodes(metadata)
        super().__init__(io.BytesIO(metadata))
        self._archive = archive
        self._folder = folder
        self._bytes_left = max_bytes
        self._contents: dict[str, bytes] = {}

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return _rebuild
        if module == "torch" and name in _STORAGES:
            return _STORAGES[name]
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        raise pickle.UnpicklingError(f"{module}.{name} is not of a dense float tensor")

    def persistent_load(self, pid: Any) -> Embeddings:
        kind, dtype, key, _, count = pid
        if kind != "storage" or not isinstance(dtype, np.dtype):
            raise pickle.UnpicklingError("a storage is expected")
        return np.frombuffer(self._read(f"{self._folder}data/{key}"), dtype)[:count]

    def _read(self, name: str) -> bytes:
        if name not in self._contents:
            self._bytes_left -= self._archive.getinfo(name).file_size
            if self._bytes_left < 0:
                raise pickle.UnpicklingError("its storages are larger than the file")
            self._contents[name] = self._archive.read(name)
        return self._contents[name]


def _check_opcodes(metadata: bytes) -> None:
    """Raise `UnpicklingError` for opcodes that no tensor has, and for memo indices that would reserve memory."""
    for opcode, argument, _ in pickletools.genops(metadata):
        if opcode.name not in _OPCODES:
            raise pickle.UnpicklingError(f"opcode {opcode.name} is not of a dense float tensor")
        if opcode.name == "LONG_BINPUT" and (argument or 0) > _MAX_PICKLE:
            raise pickle.UnpicklingError(f"memo index {argument} is too large")


def _rebuild(
    storage: Embeddings, offset: int, shape: tuple[int, ...], strides: tuple[int, ...], *ignored: Any
) -> Embeddings:
    """`torch._utils._rebuild_tensor_v2` for numpy; returns a view."""
    numbers = (offset, *shape, *strides)
    if len(shape) != len(strides) or any(type(number) is not int or number < 0 for number in numbers):
        raise pickle.UnpicklingError("a tensor has an invalid shape")
    size = math.prod(shape)
    last = offset + sum((rows - 1) * stride for rows, stride in zip(shape, strides, strict=True))
    if size > len(storage) or (size and last >= len(storage)):
        raise pickle.UnpicklingError("a tensor is larger than its storage")
    item = storage.itemsize
    return np.lib.stride_tricks.as_strided(
        storage[offset:], shape, tuple(stride * item for stride in strides), writeable=False
    )

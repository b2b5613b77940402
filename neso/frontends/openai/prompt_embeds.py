"""Decoding of prompt embeddings in JSON bodies."""

from __future__ import annotations

import base64
import binascii
import io
import pickle
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
_MAX_PICKLE = 65536
"""Maximum bytes of the pickled metadata; one tensor has a few hundred bytes."""


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
    except (zipfile.BadZipFile, pickle.UnpicklingError, KeyError, EOFError, TypeError, IndexError) as error:
        raise ValueError(f"is not a tensor saved by torch.save: {error}") from None


def _read_numpy(data: bytes) -> Embeddings:
    try:
        loaded: Embeddings = np.load(io.BytesIO(data), allow_pickle=False)
    except (ValueError, EOFError, OSError) as error:
        raise ValueError(f"is not an array saved by numpy.save: {error}") from None
    return loaded


def _read_torch(data: bytes) -> Embeddings:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        if any(entry.compress_type != zipfile.ZIP_STORED for entry in archive.infolist()):
            raise ValueError("is compressed, unlike files of torch.save")
        metadata = next((name for name in archive.namelist() if name.endswith("/data.pkl")), None)
        if metadata is None or archive.getinfo(metadata).file_size > _MAX_PICKLE:
            raise ValueError("is not a tensor saved by torch.save")
        folder = metadata.removesuffix("data.pkl")
        tensor = _Unpickler(archive, folder).load()
    if not isinstance(tensor, np.ndarray):
        raise ValueError(f"holds a {type(tensor).__name__}, not a tensor")
    return tensor


class _Unpickler(pickle.Unpickler):
    """Unpickles a dense float tensor; rejects any other class."""

    def __init__(self, archive: zipfile.ZipFile, folder: str) -> None:
        super().__init__(io.BytesIO(archive.read(folder + "data.pkl")))
        self._archive = archive
        self._folder = folder

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
        values = np.frombuffer(self._archive.read(f"{self._folder}data/{key}"), dtype)
        return values[:count]


def _rebuild(
    storage: Embeddings, offset: int, shape: tuple[int, ...], strides: tuple[int, ...], *ignored: Any
) -> Embeddings:
    """`torch._utils._rebuild_tensor_v2` for numpy; returns a copy."""
    numbers = (offset, *shape, *strides)
    if len(shape) != len(strides) or any(type(number) is not int or number < 0 for number in numbers):
        raise pickle.UnpicklingError("a tensor has an invalid shape")
    size = int(np.prod(shape, dtype=object))
    last = offset + sum((rows - 1) * stride for rows, stride in zip(shape, strides, strict=True))
    if size > len(storage) or (size and last >= len(storage)):
        raise pickle.UnpicklingError("a tensor is larger than its storage")
    item = storage.itemsize
    view = np.lib.stride_tricks.as_strided(
        storage[offset:], shape, tuple(stride * item for stride in strides), writeable=False
    )
    return view.copy()

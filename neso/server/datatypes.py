"""KServe datatypes, their numpy dtypes, and their names in a model configuration."""

from __future__ import annotations

from enum import Enum
from typing import Any

import numpy as np

from neso.server.errors import InvalidArgument, Unsupported

try:
    import ml_dtypes
except ImportError:  # Python models may run in an environment of their own that has numpy only
    ml_dtypes = None  # type: ignore[assignment]


class DataType(str, Enum):
    """Element types of the KServe v2 protocol. BYTES elements are variable-length byte strings."""

    BOOL = "BOOL"
    UINT8 = "UINT8"
    UINT16 = "UINT16"
    UINT32 = "UINT32"
    UINT64 = "UINT64"
    INT8 = "INT8"
    INT16 = "INT16"
    INT32 = "INT32"
    INT64 = "INT64"
    FP16 = "FP16"
    FP32 = "FP32"
    FP64 = "FP64"
    BF16 = "BF16"
    BYTES = "BYTES"

    dtype: np.dtype[Any]
    """The numpy dtype; object for BYTES (elements are `bytes`).

    Raises `Unsupported` for BF16 in an environment without the package ml_dtypes.
    """

    def __getattr__(self, name: str) -> Any:
        if name == "dtype":
            raise Unsupported(f"{self.value} tensors need the package ml_dtypes in this Python environment")
        raise AttributeError(name)

    @property
    def itemsize(self) -> int | None:
        """Bytes an element, None for BYTES."""
        return None if self is DataType.BYTES else self.dtype.itemsize

    @property
    def config_name(self) -> str:
        """The name in config.pbtxt, TYPE_STRING for BYTES."""
        return "TYPE_STRING" if self is DataType.BYTES else f"TYPE_{self.value}"

    @classmethod
    def parse(cls, name: str, tensor: str) -> DataType:
        """From a KServe name. Raises `InvalidArgument` that names the tensor."""
        found = cls._value2member_map_.get(name)
        if found is None:
            raise InvalidArgument(
                f"unexpected datatype '{name}' for tensor '{tensor}', expected one of {', '.join(cls)}"
            )
        return found  # type: ignore[return-value]

    @classmethod
    def from_config(cls, name: str) -> DataType:
        """From a `TYPE_*` name. Raises `InvalidArgument`."""
        kserve = "BYTES" if name == "TYPE_STRING" else name.removeprefix("TYPE_")
        return cls.parse(kserve, "")

    @classmethod
    def of_message(cls, message: Any) -> DataType:
        """The `data_type` of a message of the model configuration. Raises `InvalidArgument`."""
        kinds = message.DESCRIPTOR.fields_by_name["data_type"].enum_type.values_by_number
        return cls.from_config(kinds[message.data_type].name)

    @classmethod
    def of_numpy(cls, dtype: np.dtype[Any]) -> DataType:
        """The datatype of an array; string, bytes and object dtypes are BYTES. Raises `InvalidArgument`."""
        if dtype.kind in "SUO":
            return cls.BYTES
        found = _FROM_NUMPY.get(dtype.newbyteorder("="))
        if found is None:
            raise InvalidArgument(f"numpy dtype {dtype} has no KServe datatype")
        return found


_NUMPY: dict[DataType, np.dtype[Any]] = {
    DataType.BOOL: np.dtype(np.bool_),
    DataType.UINT8: np.dtype(np.uint8),
    DataType.UINT16: np.dtype(np.uint16),
    DataType.UINT32: np.dtype(np.uint32),
    DataType.UINT64: np.dtype(np.uint64),
    DataType.INT8: np.dtype(np.int8),
    DataType.INT16: np.dtype(np.int16),
    DataType.INT32: np.dtype(np.int32),
    DataType.INT64: np.dtype(np.int64),
    DataType.FP16: np.dtype(np.float16),
    DataType.FP32: np.dtype(np.float32),
    DataType.FP64: np.dtype(np.float64),
    DataType.BYTES: np.dtype(np.object_),
}
if ml_dtypes is not None:
    _NUMPY[DataType.BF16] = np.dtype(ml_dtypes.bfloat16)
for _datatype, _dtype in _NUMPY.items():
    _datatype.dtype = _dtype
_FROM_NUMPY = {dtype: datatype for datatype, dtype in _NUMPY.items()}

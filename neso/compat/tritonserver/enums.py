"""Triton's enumerations, with its numbers."""

from __future__ import annotations

from enum import IntEnum

from neso.server.tensor import DataType as NesoDataType


class ModelControlMode(IntEnum):
    NONE = 0
    POLL = 1
    EXPLICIT = 2


class RateLimitMode(IntEnum):
    OFF = 0
    EXEC_COUNT = 1


class InstanceGroupKind(IntEnum):
    AUTO = 0
    CPU = 1
    GPU = 2
    MODEL = 3


class LogFormat(IntEnum):
    DEFAULT = 0
    ISO8601 = 1


class MetricFormat(IntEnum):
    PROMETHEUS = 0


class MetricKind(IntEnum):
    COUNTER = 0
    GAUGE = 1
    HISTOGRAM = 2


class ModelBatchFlag(IntEnum):
    UNKNOWN = 1
    FIRST_DIM = 2


class ModelTxnPropertyFlag(IntEnum):
    ONE_TO_ONE = 1
    DECOUPLED = 2


class RequestFlag(IntEnum):
    """Bits of `InferenceRequest.flags`."""

    SEQUENCE_START = 1
    SEQUENCE_END = 2


class DataType(IntEnum):
    INVALID = 0
    BOOL = 1
    UINT8 = 2
    UINT16 = 3
    UINT32 = 4
    UINT64 = 5
    INT8 = 6
    INT16 = 7
    INT32 = 8
    INT64 = 9
    FP16 = 10
    FP32 = 11
    FP64 = 12
    BYTES = 13
    BF16 = 14

    @property
    def neso(self) -> NesoDataType:
        """The same in Neso. Raises `InvalidArgumentError` for INVALID."""
        return NesoDataType.parse(self.name, "")

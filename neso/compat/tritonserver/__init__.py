"""Triton's in-process Python API `tritonserver`, implemented by Neso.

Names, arguments and defaults are the same as in the Python package `tritonserver`; docs/guides/tritonserver-shim.md
lists the differences.
"""

from neso import __version__ as __version__
from neso.compat.tritonserver import _api as _api
from neso.compat.tritonserver.inference import (
    InferenceRequest,
    InferenceResponse,
    MemoryAllocator,
    Model,
    NumpyAllocator,
    Tensor,
    default_memory_allocators,
)
from neso.compat.tritonserver.server import Metric, MetricFamily, ModelDictionary, Server
from neso.compat.tritonserver.server_options import (
    DataType,
    InstanceGroupKind,
    LogFormat,
    MetricFormat,
    MetricKind,
    ModelBatchFlag,
    ModelControlMode,
    ModelLoadDeviceLimit,
    ModelTxnPropertyFlag,
    Options,
    RateLimiterResource,
    RateLimitMode,
)
from neso.server.errors import AlreadyExists as AlreadyExistsError
from neso.server.errors import Cancelled as CancelledError
from neso.server.errors import InternalError, UnknownError
from neso.server.errors import InvalidArgument as InvalidArgumentError
from neso.server.errors import NotFound as NotFoundError
from neso.server.errors import ServerError as TritonError
from neso.server.errors import Unavailable as UnavailableError
from neso.server.errors import Unsupported as UnsupportedError
from neso.server.inprocess.dlpack import DLDeviceType
from neso.server.inprocess.requests import AsyncResponseIterator, ResponseIterator
from neso.server.inprocess.tensor import MemoryBuffer, MemoryType

__all__ = [
    "AlreadyExistsError",
    "AsyncResponseIterator",
    "CancelledError",
    "DLDeviceType",
    "DataType",
    "InferenceRequest",
    "InferenceResponse",
    "InstanceGroupKind",
    "InternalError",
    "InvalidArgumentError",
    "LogFormat",
    "MemoryAllocator",
    "MemoryBuffer",
    "MemoryType",
    "Metric",
    "MetricFamily",
    "MetricFormat",
    "MetricKind",
    "Model",
    "ModelBatchFlag",
    "ModelControlMode",
    "ModelDictionary",
    "ModelLoadDeviceLimit",
    "ModelTxnPropertyFlag",
    "NotFoundError",
    "NumpyAllocator",
    "Options",
    "RateLimitMode",
    "RateLimiterResource",
    "ResponseIterator",
    "Server",
    "Tensor",
    "TritonError",
    "UnavailableError",
    "UnknownError",
    "UnsupportedError",
    "default_memory_allocators",
]

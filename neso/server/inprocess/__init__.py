"""The in-process API of the server, synchronous and asynchronous."""

from neso.server.inprocess.model import Model, Models
from neso.server.inprocess.requests import (
    AsyncResponseIterator,
    InferenceRequest,
    InferenceResponse,
    ResponseIterator,
)
from neso.server.inprocess.server import Server
from neso.server.inprocess.tensor import MemoryBuffer, MemoryType, Tensor
from neso.server.metrics.custom import CustomFamily as MetricFamily
from neso.server.metrics.custom import CustomMetric as Metric
from neso.server.metrics.custom import MetricKind
from neso.server.options import ServerOptions as Options

__all__ = [
    "AsyncResponseIterator",
    "InferenceRequest",
    "InferenceResponse",
    "MemoryBuffer",
    "MemoryType",
    "Metric",
    "MetricFamily",
    "MetricKind",
    "Model",
    "Models",
    "Options",
    "ResponseIterator",
    "Server",
    "Tensor",
]

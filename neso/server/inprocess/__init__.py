"""The server in the process that uses it: a synchronous and an asynchronous face of the core."""

from neso.server.custom_metrics import CustomFamily as MetricFamily
from neso.server.custom_metrics import CustomMetric as Metric
from neso.server.custom_metrics import MetricKind
from neso.server.inprocess.memory import MemoryBuffer, MemoryType
from neso.server.inprocess.model import Model
from neso.server.inprocess.models import Models
from neso.server.inprocess.request import InferenceRequest
from neso.server.inprocess.response import InferenceResponse
from neso.server.inprocess.responses import AsyncResponseIterator, ResponseIterator
from neso.server.inprocess.server import Server
from neso.server.inprocess.tensor import Tensor
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

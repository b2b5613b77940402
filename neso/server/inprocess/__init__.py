"""The server in the process that uses it: a synchronous and an asynchronous face of the core."""

from neso.server.inprocess.model import Model
from neso.server.inprocess.responses import AsyncResponseIterator, Response, ResponseIterator
from neso.server.inprocess.server import Server
from neso.server.inprocess.tensor import Tensor

__all__ = ["AsyncResponseIterator", "Model", "Response", "ResponseIterator", "Server", "Tensor"]

"""The private modules of Triton's package that programs are known to name, in annotations above all."""

from neso.compat.tritonserver import model as _model
from neso.compat.tritonserver import request as _request
from neso.compat.tritonserver import response as _response
from neso.compat.tritonserver import server as _server
from neso.compat.tritonserver import tensor as _tensor

__all__ = ["_model", "_request", "_response", "_server", "_tensor"]

"""Private modules of Triton's package that are used in programs' annotations, e.g. `tritonserver._api._request`."""

from neso.compat.tritonserver import inference as _model
from neso.compat.tritonserver import inference as _request
from neso.compat.tritonserver import inference as _response
from neso.compat.tritonserver import inference as _tensor
from neso.compat.tritonserver import server as _server

__all__ = ["_model", "_request", "_response", "_server", "_tensor"]

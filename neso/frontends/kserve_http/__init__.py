"""KServe v2 and Triton's extensions over HTTP."""

from neso.frontends.frontend_options import HttpOptions
from neso.frontends.kserve_http.frontend import KServeHttp

__all__ = ["HttpOptions", "KServeHttp"]

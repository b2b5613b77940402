"""KServe v2 and Triton's extensions over HTTP."""

from neso.frontends.kserve_http.frontend import KServeHttp
from neso.frontends.kserve_http.options import HttpOptions

__all__ = ["HttpOptions", "KServeHttp"]

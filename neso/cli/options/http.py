"""KServe over HTTP."""

from __future__ import annotations

from typing import TYPE_CHECKING

from neso.cli.options.kinds import BOOLEAN, PORT, integer
from neso.cli.options.option import Option, Topic
from neso.cli.options.values import Values

if TYPE_CHECKING:
    from neso.frontends.kserve_http import HttpOptions

HTTP = Topic(
    "HTTP",
    (
        Option("allow-http", "Serve HTTP.", BOOLEAN, True),
        Option("http-address", "Where HTTP listens.", default="0.0.0.0", metavar="HOST"),
        Option("http-port", "KServe over HTTP, and OpenAI's API under /v1.", PORT, 8000),
        Option(
            "reuse-http-port", "Share the port with other servers that have this option set.", BOOLEAN, False
        ),
        Option("http-max-input-size", "Largest request body, in bytes.", integer(1), 64 << 20),
        Option(
            "http-thread-count",
            "Threads that tritonserver handles HTTP with.",
            integer(1),
            ignored="one event loop handles all connections",
        ),
    ),
)


def http_options(values: Values) -> HttpOptions | None:
    """None if HTTP is off. Raises `ServerError`."""
    from neso.frontends.kserve_http import HttpOptions

    if not values["allow-http"]:
        return None
    return HttpOptions(values["http-address"], values["http-port"], values["http-max-input-size"])

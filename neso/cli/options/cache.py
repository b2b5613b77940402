"""The response cache."""

from __future__ import annotations

from typing import Any

from neso.cli.options.kinds import PATH, integer
from neso.cli.options.option import Option, Topic
from neso.cli.options.values import Values

CACHE = Topic(
    "Response cache",
    (
        Option(
            "cache-config",
            "Cache the responses of models that enable it: local,size=BYTES in memory, redis,host=HOST and "
            "redis,port=PORT in Redis.",
            default_text="no cache",
            metavar="CACHE,KEY=VALUE",
            repeated=True,
        ),
        Option(
            "response-cache-byte-size", "Deprecated: the same as --cache-config=local,size=BYTES.", integer(0)
        ),
        Option(
            "cache-directory",
            "Where tritonserver looks for shared libraries of caches.",
            PATH,
            ignored="caches are part of the package",
        ),
    ),
)


def cache_options(values: Values) -> dict[str, Any]:
    """Fields of `ServerOptions`. Raises `ServerError`."""
    from neso.server.response_cache.options import CacheConfig

    config = CacheConfig.parse(values["cache-config"], values["response-cache-byte-size"])
    return {"response_cache_size": config.local_size, "redis_cache": config.redis}

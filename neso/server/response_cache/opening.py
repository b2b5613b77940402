"""The cache that the options of a server ask for."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from neso.server.errors import InvalidArgument
from neso.server.inference_response import ResponseStream
from neso.server.options import ServerOptions
from neso.server.response_cache.cached_model import CachedModel, LocalCachedModel
from neso.server.response_cache.local import LocalCache
from neso.server.response_cache.remote_model import RemoteCachedModel

if TYPE_CHECKING:
    from neso.server.backend import ModelContext
    from neso.server.response_cache.redis import RedisCache

logger = logging.getLogger(__name__)


def open_cache(options: ServerOptions) -> LocalCache | RedisCache | None:
    """None without one. Raises `InvalidArgument` where the client for Redis is not installed."""
    if options.redis_cache is None:
        return LocalCache(options.response_cache_size) if options.response_cache_size else None
    try:
        from neso.server.response_cache.redis import RedisCache
    except ImportError as error:
        raise InvalidArgument(
            f"a response cache in Redis needs `pip install 'neso[redis]'`: {error}"
        ) from None
    return RedisCache(options.redis_cache)


def open_cached_model(
    context: ModelContext,
    start: Callable[[ResponseStream], None],
    ended: Callable[[ResponseStream], None],
) -> CachedModel[Any] | None:
    """None for a model whose responses are not cached; says so in the log where the user expects it."""
    if not context.config.response_cache.enable:
        return None
    cache = context.core.response_cache
    reason = ""
    if context.config.model_transaction_policy.decoupled:
        reason = "it is decoupled"
    elif context.config.HasField("sequence_batching"):
        reason = "it is stateful"
    elif cache is None:
        reason = "the server has no cache (--cache-config)"
    if cache is None or reason:
        logger.warning("model '%s': response_cache has no effect, %s", context.name, reason)
        return None
    if isinstance(cache, LocalCache):
        return LocalCachedModel(context, cache, start, ended)
    return RemoteCachedModel(context, cache, start, ended)

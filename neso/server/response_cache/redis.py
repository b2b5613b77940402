"""Response cache in Redis, shared by servers. While Redis is unavailable, every lookup is a miss."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

import msgspec
from redis.asyncio import BlockingConnectionPool, Connection, Redis, SSLConnection
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError
from redis.exceptions import TimeoutError as RedisTimeoutError

from neso.server.cache_options import RedisOptions
from neso.server.errors import InvalidArgument
from neso.server.response_cache.cache import CachedResponse

logger = logging.getLogger(__name__)

PAUSE = 1.0
"""Seconds without connection attempts after a connection error."""

T = TypeVar("T")


class RedisCache:
    """A Redis client used on the core's loop. Connects on first use."""

    def __init__(self, options: RedisOptions) -> None:
        self._address = f"{options.host}:{options.port}"
        self._client: Any = Redis(
            connection_pool=BlockingConnectionPool(
                max_connections=options.pool_size,
                timeout=_seconds(options.wait_timeout),
                host=options.host,
                port=options.port,
                db=options.db,
                username=options.user or None,
                password=options.password or None,
                socket_connect_timeout=_seconds(options.connect_timeout),
                socket_timeout=_seconds(options.socket_timeout),
                # One immediate retry: an idle connection may have been closed.
                retry=Retry(NoBackoff(), 1, supported_errors=(RedisConnectionError,)),
                **_connection(options),
            )
        )
        self._try_again = 0.0
        self._reachable = True
        self._refusals: set[str] = set()

    async def get(self, key: str) -> CachedResponse | None:
        """Return the response for a key; None if it is not stored or Redis is unavailable."""
        data: bytes | None = await self._execute(lambda: self._client.get(key))
        if data is None:
            return None
        try:
            return CachedResponse.decode(data)
        except (msgspec.MsgspecError, InvalidArgument) as error:
            self._log_failure(f"key {key} does not contain a response: {error}")
            return None

    async def put(self, key: str, response: CachedResponse) -> None:
        """Store a response; Redis decides on eviction."""
        await self._execute(lambda: self._client.set(key, response.encode()))

    async def close(self) -> None:
        await self._client.aclose()
        await self._client.connection_pool.disconnect()

    async def _execute(self, command: Callable[[], Awaitable[T]]) -> T | None:
        """Return the result of a command; log an error and return None."""
        if time.monotonic() < self._try_again:
            return None
        try:
            result = await command()
        except (RedisConnectionError, RedisTimeoutError, OSError, asyncio.TimeoutError) as error:
            self._try_again = time.monotonic() + PAUSE
            if self._reachable:
                self._reachable = False
                logger.warning(
                    "Redis at %s does not respond, responses are not cached: %s", self._address, error
                )
            return None
        except RedisError as error:
            self._log_failure(str(error))
            return None
        if not self._reachable:
            self._reachable = True
            logger.info("Redis at %s responds again", self._address)
        return result

    def _log_failure(self, refusal: str) -> None:
        """Log a Redis error, once per kind."""
        kind = refusal.split(" ")[0]
        if kind not in self._refusals:
            self._refusals.add(kind)
            logger.warning("Redis at %s: %s", self._address, refusal)


def _seconds(milliseconds: int) -> float | None:
    return milliseconds / 1000 or None


def _connection(options: RedisOptions) -> dict[str, Any]:
    if not options.uses_tls:
        return {"connection_class": Connection}
    files = {
        "ssl_certfile": options.cert,
        "ssl_keyfile": options.key,
        "ssl_ca_certs": options.cacert,
        "ssl_ca_path": options.cacert_dir,
    }
    return {
        "connection_class": _named(options.sni) if options.sni else SSLConnection,
        **{name: path for name, path in files.items() if path},
    }


def _named(server_name: str) -> type[SSLConnection]:
    """Return a connection class whose TLS server name differs from the host."""

    class NamedConnection(SSLConnection):
        def _connection_arguments(self) -> Mapping[str, Any]:
            return {**super()._connection_arguments(), "server_hostname": server_name}

    return NamedConnection

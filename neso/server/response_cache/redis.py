"""The cache in Redis, which several servers may share. It may be gone: then nothing is found, and nothing fails."""

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
"""Seconds without a try after one that did not reach Redis: requests must not wait for it one by one."""

T = TypeVar("T")


class RedisCache:
    """Belongs to the core's loop. Nothing is connected before the first use."""

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
                # Once more at once: a connection may have been closed since it was used.
                retry=Retry(NoBackoff(), 1, supported_errors=(RedisConnectionError,)),
                **_connection(options),
            )
        )
        self._try_again = 0.0
        self._reachable = True
        self._refusals: set[str] = set()

    async def get(self, key: str) -> CachedResponse | None:
        """The response that was put under that key; None without one, and when Redis does not say."""
        data: bytes | None = await self._ask(lambda: self._client.get(key))
        if data is None:
            return None
        try:
            return CachedResponse.decode(data)
        except (msgspec.MsgspecError, InvalidArgument) as error:
            self._note(f"key {key} holds no response: {error}")
            return None

    async def put(self, key: str, response: CachedResponse) -> None:
        """Keep a response, as long as Redis likes."""
        await self._ask(lambda: self._client.set(key, response.encode()))

    async def close(self) -> None:
        await self._client.aclose()
        await self._client.connection_pool.disconnect()

    async def _ask(self, command: Callable[[], Awaitable[T]]) -> T | None:
        """The answer; None and a line in the log when there is none."""
        if time.monotonic() < self._try_again:
            return None
        try:
            answer = await command()
        except (RedisConnectionError, RedisTimeoutError, OSError, asyncio.TimeoutError) as error:
            self._try_again = time.monotonic() + PAUSE
            if self._reachable:
                self._reachable = False
                logger.warning(
                    "Redis at %s does not answer, responses are not cached: %s", self._address, error
                )
            return None
        except RedisError as error:
            self._note(str(error))
            return None
        if not self._reachable:
            self._reachable = True
            logger.info("Redis at %s answers again", self._address)
        return answer

    def _note(self, refusal: str) -> None:
        """Say once that Redis refuses a command."""
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
    """Connections that ask for, and expect, the certificate of another name than the host's."""

    class NamedConnection(SSLConnection):
        def _connection_arguments(self) -> Mapping[str, Any]:
            return {**super()._connection_arguments(), "server_hostname": server_name}

    return NamedConnection

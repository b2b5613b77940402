"""Options of the response cache, `--cache-config`."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from neso.flags import Flag, integer
from neso.server.errors import InvalidArgument, Unsupported

USER_VARIABLE = "TRITONCACHE_REDIS_USERNAME"
PASSWORD_VARIABLE = "TRITONCACHE_REDIS_PASSWORD"


@dataclass(frozen=True, slots=True)
class RedisOptions:
    """Address, timeouts (milliseconds, 0 = none) and TLS settings of Redis.

    `wait_timeout` limits the wait for one of the `pool_size` connections. `cert`, `key`, `cacert`, `cacert_dir` are
    paths; each of them enables TLS. `sni`: expected name in the server's certificate, `host` if empty.
    """

    host: str
    port: int
    user: str = ""
    password: str = field(default="", repr=False)
    db: int = 0
    connect_timeout: int = 1000
    socket_timeout: int = 1000
    pool_size: int = 8
    wait_timeout: int = 100
    tls_enabled: bool = False
    cert: str = ""
    key: str = ""
    cacert: str = ""
    cacert_dir: str = ""
    sni: str = ""

    def __post_init__(self) -> None:
        if not self.host or not 0 < self.port < 65536:
            raise InvalidArgument(
                f"the redis cache needs a host and a port of 1 to 65535, got '{self.host}' and {self.port}"
            )
        for name in ("db", "connect_timeout", "socket_timeout", "wait_timeout"):
            if getattr(self, name) < 0:
                raise InvalidArgument(
                    f"{name} of the redis cache must not be negative: {getattr(self, name)}"
                )
        if self.pool_size < 1:
            raise InvalidArgument(f"pool_size of the redis cache must be at least 1: {self.pool_size}")
        if bool(self.cert) != bool(self.key):
            raise InvalidArgument("the redis cache needs both cert and key, or neither")

    @property
    def uses_tls(self) -> bool:
        return self.tls_enabled or any((self.cert, self.cacert, self.cacert_dir, self.sni))

    @classmethod
    def from_settings(
        cls, settings: Mapping[str, str], environment: Mapping[str, str] = os.environ
    ) -> RedisOptions:
        """Parse settings with Triton's names. User and password default to the values in `environment`.

        Raises `InvalidArgument`.
        """
        values: dict[str, Any] = {
            "user": environment.get(USER_VARIABLE, ""),
            "password": environment.get(PASSWORD_VARIABLE, ""),
        }
        for name, text in settings.items():
            values[name] = _READERS[name](name, text)
        for name in ("host", "port"):
            if name not in values:
                raise InvalidArgument(
                    f"--cache-config redis: '{name}' is missing, expected redis,host=HOST and redis,port=PORT"
                )
        return cls(**values)


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """Response cache: `local_size` bytes in memory, Redis, or disabled."""

    local_size: int = 0
    redis: RedisOptions | None = None

    @classmethod
    def parse(
        cls,
        settings: Annotated[
            Iterable[str],
            Flag(
                "cache-config",
                "Cache the responses of models that enable it: local,size=BYTES in memory, redis,host=HOST and "
                "redis,port=PORT in Redis.",
                default_text="no cache",
                metavar="CACHE,KEY=VALUE",
                repeated=True,
            ),
        ],
        byte_size: Annotated[
            int | None,
            Flag(
                "response-cache-byte-size",
                "Deprecated: the same as --cache-config=local,size=BYTES.",
                integer(0),
            ),
        ] = None,
    ) -> CacheConfig:
        """Parse `CACHE,KEY=VALUE[,KEY=VALUE…]` settings. Raises `ServerError`."""
        caches: dict[str, dict[str, str]] = {}
        for setting in settings:
            cache, _, pairs = setting.partition(",")
            if cache not in _KEYS:
                raise Unsupported(
                    f"--cache-config '{setting}': there is no cache '{cache}', only local and redis"
                )
            caches.setdefault(cache, {}).update(_pairs(setting, pairs, _KEYS[cache]))
        if not caches:
            return cls(byte_size or 0)
        if byte_size is not None:
            raise InvalidArgument(
                "incompatible flags: --cache-config and --response-cache-byte-size cannot be given together"
            )
        if len(caches) > 1:
            raise InvalidArgument(
                f"--cache-config: multiple cache configurations, expected one, got {' and '.join(caches)}"
            )
        if "redis" in caches:
            return cls(redis=RedisOptions.from_settings(caches["redis"]))
        return cls(_integer("size", caches["local"]["size"], "local"))


def _pairs(setting: str, text: str, keys: Iterable[str]) -> dict[str, str]:
    # Values may contain commas.
    parts = re.split(f",(?=(?:{'|'.join(keys)})=)", text)
    pairs = {}
    for part in parts:
        key, equals, value = part.partition("=")
        if not equals or key not in keys:
            cache = setting.partition(",")[0]
            raise InvalidArgument(
                f"--cache-config '{cache},{key}…': expected {cache},KEY=VALUE with a KEY of {', '.join(keys)}"
            )
        pairs[key] = value
    return pairs


def _text(name: str, text: str) -> str:
    return text


def _integer(name: str, text: str, cache: str = "redis") -> int:
    if not text.isdecimal():
        raise InvalidArgument(f"--cache-config '{cache},{name}={text}': expected a number")
    return int(text)


def _boolean(name: str, text: str) -> bool:
    if text.lower() not in ("true", "false", "1", "0"):
        raise InvalidArgument(f"--cache-config 'redis,{name}={text}': expected true or false")
    return text.lower() in ("true", "1")


_READERS: dict[str, Callable[[str, str], Any]] = {
    "host": _text,
    "port": _integer,
    "user": _text,
    "password": _text,
    "db": _integer,
    "connect_timeout": _integer,
    "socket_timeout": _integer,
    "pool_size": _integer,
    "wait_timeout": _integer,
    "tls_enabled": _boolean,
    "cert": _text,
    "key": _text,
    "cacert": _text,
    "cacert_dir": _text,
    "sni": _text,
}
_KEYS: dict[str, tuple[str, ...]] = {"local": ("size",), "redis": tuple(_READERS)}

"""What the one who starts the server decides."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from os import PathLike
from pathlib import Path
from typing import Any

from neso.server.errors import InvalidArgument
from neso.server.metrics.config import MetricsConfig
from neso.server.rate_limiter.options import RateLimitMode, ResourceLimit
from neso.server.repository.names import stays_inside
from neso.server.response_cache.options import RedisOptions
from neso.server.tracing.settings import TraceConfig


class ModelControlMode(str, Enum):
    """Who decides which models are loaded."""

    NONE = "none"
    """All models of the repositories, at start."""
    EXPLICIT = "explicit"
    """The startup models, then whatever load and unload requests say."""
    POLL = "poll"
    """What the repositories hold at the moment: they are looked at from time to time."""


@dataclass(frozen=True)
class ServerOptions:
    """Options of the core; front ends have their own.

    `model_repository`: directories, or URIs of folders in a bucket. In EXPLICIT mode `startup_models` are loaded at
    start, `("*",)` means all; in POLL mode the repositories are looked at every `repository_poll_secs` (0: only when
    asked). `model_config_name`: `configs/<name>.pbtxt` of a model, where there is one, is read in place of its
    config.pbtxt. `model_namespacing`: repositories may have models of the same name. `model_load_thread_count`: so many
    versions of models are loaded at a time; one that fails is tried `model_load_retry_count` times more.
    `strict_readiness`: the server
    is ready only while every model that was to be loaded is. `exit_on_error` is for the process around the
    core: the core itself goes on when a model fails. `exit_timeout` and `unload_timeout` (seconds) bound how
    long requests in flight may take to end when the server stops, and when a model is unloaded or replaced.
    `backend_config` holds settings by backend name. `response_cache_size` (bytes) is that of the response cache of
    all models that enable it, in memory; 0: there is none. `redis_cache`: it is in Redis instead. `allow_client_shm`:
    clients may have tensors read from and written to system shared memory. `rate_limit` says whether executions wait
    for resources, `rate_limit_resources` how much there is of them; without any, the most that an instance needs.
    `metrics`: what is measured. `trace`: what is traced from the start on. `config_checks`: what front ends demand of a
    model's configuration (a `ModelConfig`); a `ServerError` that one raises is why the model is not loaded.
    Raises `ServerError` for options that cannot be served.
    """

    model_repository: tuple[Path | str, ...] = ()
    server_id: str = "neso"
    model_control_mode: ModelControlMode = ModelControlMode.NONE
    startup_models: tuple[str, ...] = ()
    repository_poll_secs: float = 15.0
    model_config_name: str = ""
    model_namespacing: bool = False
    model_load_thread_count: int = 4
    model_load_retry_count: int = 0
    strict_readiness: bool = True
    exit_on_error: bool = True
    exit_timeout: float = 30.0
    unload_timeout: float = 300.0
    disable_auto_complete_config: bool = False
    backend_config: dict[str, dict[str, str]] = field(default_factory=dict)
    response_cache_size: int = 0
    redis_cache: RedisOptions | None = None
    allow_client_shm: bool = False
    rate_limit: RateLimitMode = RateLimitMode.OFF
    rate_limit_resources: tuple[ResourceLimit, ...] = ()
    metrics: MetricsConfig = field(default_factory=MetricsConfig)
    trace: TraceConfig = field(default_factory=TraceConfig)
    config_checks: tuple[Callable[[Any], None], ...] = ()

    def __post_init__(self) -> None:
        self._normalize()
        if self.response_cache_size < 0:
            raise InvalidArgument(
                f"the size of the response cache must not be negative: {self.response_cache_size}"
            )
        if self.response_cache_size and self.redis_cache is not None:
            raise InvalidArgument("there can be one response cache, in memory or in Redis, not both")
        if self.startup_models and self.model_control_mode is not ModelControlMode.EXPLICIT:
            raise InvalidArgument("startup models can be named in model control mode 'explicit' only")
        if "*" in self.startup_models and len(self.startup_models) > 1:
            raise InvalidArgument(
                "Wildcard model name '*' must be the ONLY startup model if specified at all."
            )
        for name, value, least in (
            ("repository_poll_secs", self.repository_poll_secs, 0),
            ("model_load_thread_count", self.model_load_thread_count, 1),
            ("model_load_retry_count", self.model_load_retry_count, 0),
        ):
            if not value >= least:
                raise InvalidArgument(f"{name} must be at least {least}, got {value}")
        if not stays_inside(self.model_config_name):
            raise InvalidArgument(
                f"model_config_name must be the name of a file in 'configs', got '{self.model_config_name}'"
            )

    def _normalize(self) -> None:
        """Take what callers without a type checker write: one path, text for paths, a mode's name, lists."""
        repository: Any = self.model_repository
        if isinstance(repository, str | PathLike):
            repository = (repository,)
        # Text is left as it is: it may be the URI of a bucket.
        paths = tuple(path if isinstance(path, str) else Path(path) for path in repository)
        object.__setattr__(self, "model_repository", paths)
        object.__setattr__(self, "startup_models", tuple(self.startup_models))
        try:
            object.__setattr__(self, "model_control_mode", ModelControlMode(self.model_control_mode))
        except ValueError:
            raise InvalidArgument(
                f"unknown model control mode '{self.model_control_mode}', "
                f"expected one of {', '.join(ModelControlMode)}"
            ) from None

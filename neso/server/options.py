"""What the one who starts the server decides."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from neso.server.errors import InvalidArgument, Unsupported
from neso.server.tracing.config import TraceConfig


class ModelControlMode(str, Enum):
    """Who decides which models are loaded."""

    NONE = "none"
    """All models of the repositories, at start."""
    EXPLICIT = "explicit"
    """The startup models, then whatever load and unload requests say."""
    POLL = "poll"
    """What the repositories hold at the moment. Not available yet."""


@dataclass(frozen=True)
class ServerOptions:
    """Options of the core; front ends have their own.

    In EXPLICIT mode `startup_models` are loaded at start, `("*",)` means all. `strict_readiness`: the server
    is ready only while every model that was to be loaded is. `exit_on_error` is for the process around the
    core: the core itself goes on when a model fails. `exit_timeout` and `unload_timeout` (seconds) bound how
    long requests in flight may take to end when the server stops, and when a model is unloaded or replaced.
    `backend_config` holds settings by backend name. `response_cache_size` (bytes) is that of the response cache of
    all models that enable it; 0: there is none. `allow_client_shm`: clients may have tensors read from and written
    to system shared memory. `trace`: what is traced from the start on. Raises `ServerError` for
    options that cannot be served.
    """

    model_repository: tuple[Path, ...] = ()
    server_id: str = "neso"
    model_control_mode: ModelControlMode = ModelControlMode.NONE
    startup_models: tuple[str, ...] = ()
    strict_readiness: bool = True
    exit_on_error: bool = True
    exit_timeout: float = 30.0
    unload_timeout: float = 300.0
    disable_auto_complete_config: bool = False
    backend_config: dict[str, dict[str, str]] = field(default_factory=dict)
    response_cache_size: int = 0
    allow_client_shm: bool = False
    trace: TraceConfig = field(default_factory=TraceConfig)

    def __post_init__(self) -> None:
        if self.model_control_mode is ModelControlMode.POLL:
            raise Unsupported("model control mode 'poll' is not supported yet, use 'none' or 'explicit'")
        if self.response_cache_size < 0:
            raise InvalidArgument(
                f"the size of the response cache must not be negative: {self.response_cache_size}"
            )
        if self.startup_models and self.model_control_mode is not ModelControlMode.EXPLICIT:
            raise InvalidArgument("startup models can be named in model control mode 'explicit' only")

"""Triton's enumerations and server options, and their conversion to Neso's."""

from __future__ import annotations

import json
import warnings
from dataclasses import MISSING, Field, dataclass, field, fields
from enum import IntEnum
from pathlib import Path
from typing import Any

from neso.server.cache_options import CacheConfig
from neso.server.errors import InvalidArgument
from neso.server.metrics.config import MetricsConfig
from neso.server.options import ModelControlMode as NesoControlMode
from neso.server.options import RateLimitMode as NesoRateLimit
from neso.server.options import ResourceLimit, ServerOptions
from neso.server.tensor import DataType as NesoDataType


class ModelControlMode(IntEnum):
    NONE = 0
    POLL = 1
    EXPLICIT = 2


class RateLimitMode(IntEnum):
    OFF = 0
    EXEC_COUNT = 1


class InstanceGroupKind(IntEnum):
    AUTO = 0
    CPU = 1
    GPU = 2
    MODEL = 3


class LogFormat(IntEnum):
    DEFAULT = 0
    ISO8601 = 1


class MetricFormat(IntEnum):
    PROMETHEUS = 0


class MetricKind(IntEnum):
    COUNTER = 0
    GAUGE = 1
    HISTOGRAM = 2


class ModelBatchFlag(IntEnum):
    UNKNOWN = 1
    FIRST_DIM = 2


class ModelTxnPropertyFlag(IntEnum):
    ONE_TO_ONE = 1
    DECOUPLED = 2


class RequestFlag(IntEnum):
    """Bits of `InferenceRequest.flags`."""

    SEQUENCE_START = 1
    SEQUENCE_END = 2


class DataType(IntEnum):
    INVALID = 0
    BOOL = 1
    UINT8 = 2
    UINT16 = 3
    UINT32 = 4
    UINT64 = 5
    INT8 = 6
    INT16 = 7
    INT32 = 8
    INT64 = 9
    FP16 = 10
    FP32 = 11
    FP64 = 12
    BYTES = 13
    BF16 = 14

    @property
    def neso(self) -> NesoDataType:
        """Neso's datatype. Raises `InvalidArgumentError` for INVALID."""
        return NesoDataType.parse(self.name, "")


@dataclass
class RateLimiterResource:
    """Available count of a rate-limiter resource on a device (-1: on each device)."""

    name: str
    count: int
    device: int


@dataclass
class ModelLoadDeviceLimit:
    """Fraction of a device's memory that a model may use."""

    kind: InstanceGroupKind
    device: int
    fraction: float


_IGNORED = {"ignored": True}
"""Metadata of options without effect in Neso."""


@dataclass
class Options:
    """Server options with Triton's names and defaults. Validated by `Server.start`."""

    model_repository: str | list[str] = field(default_factory=list)
    server_id: str = "triton"
    model_control_mode: ModelControlMode = ModelControlMode.NONE
    startup_models: list[str] = field(default_factory=list)
    strict_model_config: bool = False
    rate_limiter_mode: RateLimitMode = RateLimitMode.OFF
    rate_limiter_resources: list[RateLimiterResource] = field(default_factory=list)
    pinned_memory_pool_size: int = field(default=1 << 28, metadata=_IGNORED)
    cuda_memory_pool_sizes: dict[int, int] = field(default_factory=dict, metadata=_IGNORED)
    cache_config: dict[str, dict[str, Any]] = field(default_factory=dict)
    cache_directory: str = field(default="/opt/tritonserver/caches", metadata=_IGNORED)
    min_supported_compute_capability: float = field(default=6.0, metadata=_IGNORED)
    exit_on_error: bool = True
    strict_readiness: bool = True
    exit_timeout: int = 30
    buffer_manager_thread_count: int = field(default=0, metadata=_IGNORED)
    model_load_thread_count: int = 4
    model_load_retry_count: int = 0
    model_namespacing: bool = False
    enable_peer_access: bool = field(default=True, metadata=_IGNORED)
    log_file: str | None = None
    log_info: bool = False
    log_warn: bool = False
    log_error: bool = False
    log_format: LogFormat = LogFormat.DEFAULT
    log_verbose: int = 0
    metrics: bool = True
    gpu_metrics: bool = True
    cpu_metrics: bool = True
    metrics_interval: int = 2000
    backend_directory: str = "/opt/tritonserver/backends"
    repo_agent_directory: str = field(default="/opt/tritonserver/repoagents", metadata=_IGNORED)
    model_load_device_limits: list[ModelLoadDeviceLimit] = field(default_factory=list, metadata=_IGNORED)
    backend_configuration: dict[str, dict[str, str]] = field(default_factory=dict)
    host_policies: dict[str, dict[str, str]] = field(default_factory=dict, metadata=_IGNORED)
    metrics_configuration: dict[str, dict[str, str]] = field(default_factory=dict)

    def to_neso(self) -> ServerOptions:
        """Convert to options of Neso's core. Warns about options without effect.

        Raises `TypeError` for a value of the wrong type, `InvalidArgumentError`, `UnsupportedError`.
        """
        for option in fields(self):
            self._check_type(option)
            if "ignored" in option.metadata and getattr(self, option.name) != _default_of(option):
                warnings.warn(f"tritonserver.Options: {option.name} has no effect in Neso", stacklevel=4)
        cache = self._cache()
        explicit = self.model_control_mode is ModelControlMode.EXPLICIT
        return ServerOptions(
            model_repository=self._repositories(),
            server_id=self.server_id,
            model_control_mode=NesoControlMode[self.model_control_mode.name],
            startup_models=tuple(self.startup_models) if explicit else (),
            strict_readiness=self.strict_readiness,
            exit_on_error=self.exit_on_error,
            exit_timeout=self.exit_timeout,
            disable_auto_complete_config=self.strict_model_config,
            backend_config={
                backend: {key: str(value) for key, value in settings.items()}
                for backend, settings in self.backend_configuration.items()
            },
            response_cache_size=cache.local_size,
            redis_cache=cache.redis,
            rate_limit=_RATE_LIMITS[self.rate_limiter_mode],
            rate_limit_resources=tuple(
                ResourceLimit(limit.name, limit.count, None if limit.device < 0 else limit.device)
                for limit in self.rate_limiter_resources
            ),
            model_load_thread_count=self.model_load_thread_count,
            model_load_retry_count=self.model_load_retry_count,
            model_namespacing=self.model_namespacing,
            backend_directory=Path(self.backend_directory),
            metrics=self._metrics(),
            repository_poll_secs=0,  # polled by poll_model_repository()
        )

    def _repositories(self) -> Any:
        paths = [self.model_repository] if isinstance(self.model_repository, str) else self.model_repository
        if not paths:
            raise InvalidArgument("Model repository must be specified.")
        for path in paths:
            if not isinstance(path, str):
                raise TypeError(f"Options.model_repository must be text or a list of it, got {path!r}")
        return tuple(paths)

    def _cache(self) -> CacheConfig:
        settings = []
        for name, values in self.cache_config.items():
            if isinstance(values, str):
                values = json.loads(values)
            settings += [f"{name},{key}={value}" for key, value in values.items()]
        return CacheConfig.parse(settings)

    def _metrics(self) -> MetricsConfig:
        # Keys are backend names, or "" for all backends. Neso has one registry for all.
        settings = [
            f"{name}={value}" for some in self.metrics_configuration.values() for name, value in some.items()
        ]
        return MetricsConfig.parse(
            settings,
            cpu=self.metrics and self.cpu_metrics,
            gpu=self.metrics and self.gpu_metrics,
            interval_ms=self.metrics_interval,
        )

    def _check_type(self, option: Field[Any]) -> None:
        value, default = getattr(self, option.name), _default_of(option)
        if option.name == "model_repository":
            expected: tuple[type, ...] = (str, list, tuple, type(None))
        elif option.name == "log_file":
            expected = (str, type(None))
        elif isinstance(default, float):
            expected = (int, float)
        else:
            expected = (type(default),)
        if not isinstance(value, expected) or (isinstance(value, int) and type(default) is int and value < 0):
            raise TypeError(f"Options.{option.name} must be like {default!r}, got {value!r}")


def _default_of(option: Field[Any]) -> Any:
    return option.default if option.default_factory is MISSING else option.default_factory()


_RATE_LIMITS = {
    RateLimitMode.OFF: NesoRateLimit.OFF,
    RateLimitMode.EXEC_COUNT: NesoRateLimit.EXECUTION_COUNT,
}

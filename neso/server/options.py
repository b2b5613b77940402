"""Options of the server core, and the flags of `neso serve` that set them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import Enum
from os import PathLike
from pathlib import Path
from typing import Annotated, Any

from neso.flags import LEVEL, PATH_OR_URI, SWITCH, Flag, FlagGroup, integer, number
from neso.server.admission import AdmissionLimits
from neso.server.backlog import DEFAULT_CALL_LIMIT, DEFAULT_CALL_TIMEOUT, DEFAULT_LIMIT, MAX_CALL_TIMEOUT
from neso.server.cache_options import RedisOptions
from neso.server.errors import InvalidArgument
from neso.server.metrics.config import MetricsConfig
from neso.server.repository.names import is_inside
from neso.server.stage_options import StageOptions
from neso.server.trace_config import TraceConfig


class ModelControlMode(str, Enum):
    """When models are loaded and unloaded."""

    NONE = "none"
    """All models of the repositories are loaded at start."""
    EXPLICIT = "explicit"
    """The startup models are loaded at start, other models on request."""
    POLL = "poll"
    """The repositories are polled; changed models are loaded and unloaded accordingly."""


class RateLimitMode(str, Enum):
    """Mode of the rate limiter, `--rate-limit`."""

    OFF = "off"
    """An execution starts as soon as an instance is free; `rate_limiter` in model configurations is ignored."""
    EXECUTION_COUNT = "execution_count"
    """An execution also waits for the resources of its instance. Order: number of executions so far times priority."""


@dataclass(frozen=True, slots=True)
class ResourceLimit:
    """Amount of a rate limiter resource on one device or, if `device` is None, on each device."""

    name: str
    count: int
    device: int | None = None

    @classmethod
    def parse(cls, text: str) -> ResourceLimit:
        """Parse "name:count" or "name:count:device". Raises `InvalidArgument`."""
        parts = text.split(":")
        numbers = parts[1:]
        if (
            not parts[0]
            or len(numbers) not in (1, 2)
            or not all(n.isascii() and n.isdigit() for n in numbers)
        ):
            raise InvalidArgument(
                "--rate-limit-resource option format is '<resource_name>:<count>:<device>' or "
                f"'<resource_name>:<count>'. Got {text}"
            )
        return cls(parts[0], int(numbers[0]), int(numbers[1]) if len(numbers) == 2 else None)


class LogFormat(str, Enum):
    """Format of log lines; `DEFAULT` and `ISO8601` are Triton's."""

    DEFAULT = "default"
    ISO8601 = "ISO8601"
    JSON = "JSON"

    @classmethod
    def parse(cls, text: str) -> LogFormat:
        """Parse the name of a format. Raises `InvalidArgument`."""
        try:
            return cls(text)
        except ValueError:
            known = ", ".join(format.value for format in cls)
            raise InvalidArgument(f"invalid argument for log_format, got: {text}, expected {known}") from None


@dataclass(frozen=True, slots=True)
class LogOptions:
    """Log options of the process. `file` "" selects standard error."""

    info: Annotated[bool, Flag("log-info", "Log informational messages.")] = True
    warning: Annotated[bool, Flag("log-warning", "Log warnings.")] = True
    error: Annotated[bool, Flag("log-error", "Log errors.")] = True
    verbose_level: Annotated[
        int,
        Flag(
            "log-verbose",
            "Log verbosity (0 = info, 1 = debug, 2 = debug including libraries).",
            LEVEL,
            aliases=("tritonserver-log-verbose-level",),
        ),
    ] = 0
    format: Annotated[
        LogFormat,
        Flag("log-format", "Format of log lines: Triton's default or ISO8601, or one JSON object per line."),
    ] = LogFormat.DEFAULT
    file: Annotated[str, Flag("log-file", "Log file.", metavar="FILE", default_text="standard error")] = ""
    stats_interval: Annotated[
        float,
        Flag(
            "log-stats-interval",
            "Seconds between two log lines with the throughput of each language model that has requests. 0: none.",
            number(0),
        ),
    ] = 10.0


def _resource_limits(texts: Iterable[str]) -> tuple[ResourceLimit, ...]:
    return tuple(map(ResourceLimit.parse, texts))


def _backend_settings(texts: Iterable[str]) -> dict[str, dict[str, str]]:
    """Parse `BACKEND,KEY=VALUE` into settings by backend. Raises `InvalidArgument`."""
    settings: dict[str, dict[str, str]] = {}
    for text in texts:
        backend, comma, pair = text.partition(",")
        key, equals, value = pair.partition("=")
        if not (backend and comma and key and equals):
            raise InvalidArgument(f"expected BACKEND,KEY=VALUE, got '{text}'")
        settings.setdefault(backend, {})[key] = value
    return settings


def _disable_auto_complete(
    disable: Annotated[
        bool, Flag("disable-auto-complete-config", "Do not complete model configurations.", SWITCH)
    ] = False,
    strict: Annotated[
        bool | None,
        Flag("strict-model-config", "Deprecated: true is the same as --disable-auto-complete-config."),
    ] = None,
) -> bool:
    return disable or bool(strict)


@dataclass(frozen=True)
class ServerOptions:
    """Options of the core; each frontend has separate options. Raises `ServerError` for invalid options.

    Options without a flag:
    - replace_timeout: seconds that requests in flight have to end on a version that was replaced by a reload
    - response_cache_size: bytes of the in-memory response cache; 0 disables it
    - redis_cache: response cache in Redis, instead of in memory
    - config_checks: called with each `ModelConfig`; a raised `ServerError` fails the load of the model

    `exit_on_error` applies to the process that runs the core; the core itself continues when a model fails to load.
    """

    model_repository: Annotated[
        tuple[Path | str, ...],
        Flag(
            "model-repository",
            "Model repository in Triton's layout: a directory, or the URI of a folder in a bucket.",
            PATH_OR_URI,
            aliases=("model-store",),
        ),
    ] = ()
    server_id: Annotated[
        str, Flag("id", "Server name in the server metadata.", metavar="NAME", topic="Process")
    ] = "neso"
    model_control_mode: Annotated[
        ModelControlMode,
        Flag(
            "model-control-mode",
            "none: load all models at start. explicit: load the models of --load-model, others on request. poll: "
            "follow the changes of the repositories.",
        ),
    ] = ModelControlMode.NONE
    startup_models: Annotated[
        tuple[str, ...],
        Flag("load-model", "Model to load at start in explicit mode; * alone loads all."),
    ] = ()
    repository_poll_secs: Annotated[
        float,
        Flag(
            "repository-poll-secs",
            "Seconds between two polls of the repositories in mode poll (0 = only on request).",
            number(0),
        ),
    ] = 15.0
    model_config_name: Annotated[
        str,
        Flag(
            "model-config-name",
            "Read configs/NAME.pbtxt instead of config.pbtxt for models that have it.",
            metavar="NAME",
        ),
    ] = ""
    model_namespacing: Annotated[
        bool, Flag("model-namespacing", "Serve models of the same name from several repositories.")
    ] = False
    model_load_thread_count: Annotated[
        int, Flag("model-load-thread-count", "Number of models loaded concurrently.", integer(1))
    ] = 4
    model_load_retry_count: Annotated[
        int, Flag("model-load-retry-count", "Number of retries of a failed load.", integer(0))
    ] = 0
    strict_readiness: Annotated[
        bool, Flag("strict-readiness", "Report ready only while every requested model is ready.")
    ] = True
    exit_on_error: Annotated[
        bool, Flag("exit-on-error", "Exit if a model fails to load at start.", default=False)
    ] = True
    exit_timeout: Annotated[
        float,
        Flag(
            "exit-timeout-secs",
            "Seconds that requests in flight have to finish at exit.",
            number(0),
            topic="Process",
        ),
    ] = 30.0
    unload_timeout: Annotated[
        float,
        Flag(
            "unload-timeout-secs",
            "Seconds that requests in flight and the instances of a model have to end when it is unloaded.",
            number(0),
        ),
    ] = 60.0
    replace_timeout: float = 300.0
    disable_auto_complete_config: Annotated[bool, FlagGroup(_disable_auto_complete)] = False
    backend_directory: Annotated[
        Path | None,
        Flag(
            "backend-directory",
            "Directory of Python-based backends: models with backend NAME run the file NAME/model.py.",
            default_text="none",
        ),
    ] = None
    backend_config: Annotated[
        dict[str, dict[str, str]],
        Flag(
            "backend-config",
            "Setting of a backend.",
            repeated=True,
            metavar="BACKEND,KEY=VALUE",
            convert=_backend_settings,
        ),
    ] = field(default_factory=dict)
    response_cache_size: int = 0
    redis_cache: RedisOptions | None = None
    allow_client_shm: Annotated[
        bool,
        Flag(
            "allow-client-shm",
            "Allow clients to register shared memory for input and output tensors.",
            topic="Memory and devices",
        ),
    ] = False
    admission: Annotated[AdmissionLimits, FlagGroup(AdmissionLimits, topic="Limits")] = field(
        default_factory=AdmissionLimits
    )
    max_response_backlog: Annotated[
        int,
        Flag(
            "max-response-backlog",
            "Bytes of responses to one request that wait for its client before the model waits; at 16 times as many "
            "the request is cancelled.",
            integer(1),
            topic="Limits",
        ),
    ] = DEFAULT_LIMIT
    max_call_backlog: Annotated[
        int,
        Flag(
            "max-call-backlog",
            "Bytes of responses of a decoupled BLS call that wait for the calling model before the called model waits; "
            "at twice as many the call is cancelled.",
            integer(1 << 20),
            topic="Limits",
        ),
    ] = DEFAULT_CALL_LIMIT
    call_backlog_timeout: Annotated[
        float,
        Flag(
            "call-backlog-timeout-secs",
            "Time that a called model waits for the model that called it, which takes none of the responses, before "
            "the call is cancelled.",
            number(0.1, MAX_CALL_TIMEOUT),
            topic="Limits",
        ),
    ] = DEFAULT_CALL_TIMEOUT
    rate_limit: Annotated[
        RateLimitMode,
        Flag(
            "rate-limit",
            "execution_count: executions wait for the resources that their models name.",
            topic="Rate limiter",
        ),
    ] = RateLimitMode.OFF
    rate_limit_resources: Annotated[
        tuple[ResourceLimit, ...],
        Flag(
            "rate-limit-resource",
            "Amount of a resource; by default the most that one instance needs.",
            repeated=True,
            metavar="NAME:COUNT[:DEVICE]",
            topic="Rate limiter",
            convert=_resource_limits,
        ),
    ] = ()
    metrics: Annotated[MetricsConfig, FlagGroup(MetricsConfig.parse, topic="Metrics")] = field(
        default_factory=MetricsConfig
    )
    trace: Annotated[TraceConfig, FlagGroup(TraceConfig.parse, topic="Tracing")] = field(
        default_factory=TraceConfig
    )
    stages: Annotated[
        StageOptions, FlagGroup(StageOptions, topic="Stages (models of a repository on workers)")
    ] = field(default_factory=StageOptions)
    config_checks: tuple[Callable[[Any], None], ...] = ()
    stage_share: tuple[int, int] | None = None
    """In a worker of a stage: its number and the number of workers of this host, which share CPUs, GPUs and memory."""

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
        for name, value, minimum in (
            ("repository_poll_secs", self.repository_poll_secs, 0),
            ("model_load_thread_count", self.model_load_thread_count, 1),
            ("model_load_retry_count", self.model_load_retry_count, 0),
            ("max_response_backlog", self.max_response_backlog, 1),
            ("max_call_backlog", self.max_call_backlog, 1 << 20),
            ("call_backlog_timeout", self.call_backlog_timeout, 0.1),
        ):
            if not value >= minimum:
                raise InvalidArgument(f"{name} must be at least {minimum}, got {value}")
        if self.call_backlog_timeout > MAX_CALL_TIMEOUT:
            raise InvalidArgument(f"call_backlog_timeout must be at most {MAX_CALL_TIMEOUT:.0f} seconds")
        if not is_inside(self.model_config_name):
            raise InvalidArgument(
                f"model_config_name must be the name of a file in 'configs', got '{self.model_config_name}'"
            )

    def _normalize(self) -> None:
        """Accept a single path, paths and modes as strings, and lists instead of tuples."""
        repository: Any = self.model_repository
        if isinstance(repository, str | PathLike):
            repository = (repository,)
        # Strings stay unchanged: they can be bucket URIs.
        paths = tuple(path if isinstance(path, str) else Path(path) for path in repository)
        object.__setattr__(self, "model_repository", paths)
        object.__setattr__(self, "startup_models", tuple(self.startup_models))
        if self.backend_directory is not None:
            object.__setattr__(self, "backend_directory", Path(self.backend_directory))
        try:
            object.__setattr__(self, "model_control_mode", ModelControlMode(self.model_control_mode))
        except ValueError:
            raise InvalidArgument(
                f"unknown model control mode '{self.model_control_mode}', "
                f"expected one of {', '.join(ModelControlMode)}"
            ) from None

"""Triton's in-process server: life cycle, model repository, custom metrics and log output."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import asdict
from types import TracebackType
from typing import Any

from neso.compat.tritonserver.inference import Model
from neso.compat.tritonserver.server_options import LogFormat, MetricFormat, MetricKind, Options
from neso.server.errors import InternalError, InvalidArgument, NotFound, Unavailable
from neso.server.inprocess import Server as NesoServer
from neso.server.log import LogFormat as NesoFormat
from neso.server.log.settings import make_formatter
from neso.server.metadata import ModelState
from neso.server.metrics.custom import CustomMetrics
from neso.server.metrics.custom import MetricKind as NesoKind

# In Triton, metric families belong to the process, not to a server.
process_metrics = CustomMetrics(lambda name: name.startswith("nv_"))


class MetricFamily:
    """Metrics with the same name and kind. Raises `InvalidArgumentError`; `AlreadyExistsError` if the kind differs."""

    def __init__(self, kind: MetricKind, name: str, description: str) -> None:
        self.kind = kind
        self.neso = process_metrics.family(name, description, NesoKind[kind.name])


class Metric:
    """One metric of a family, identified by its labels. Exported as long as this object is referenced.

    `buckets`: upper bounds, required for a histogram.
    """

    def __init__(
        self, family: MetricFamily, labels: dict[str, str] | None = None, buckets: list[float] | None = None
    ) -> None:
        self._kind = family.kind
        self._metric = family.neso.metric(labels, buckets)

    @property
    def kind(self) -> MetricKind:
        return self._kind

    @property
    def value(self) -> float:
        """Current value of a counter or a gauge. Raises `UnsupportedError` for a histogram."""
        return self._metric.value()

    def increment(self, value: float) -> None:
        """Add to a counter or a gauge. Raises `InvalidArgumentError`, `UnsupportedError` for a histogram."""
        self._metric.increment(value)

    def set_value(self, value: float) -> None:
        """Set a gauge. Raises `UnsupportedError` for other kinds."""
        self._metric.set(value)

    def observe(self, value: float) -> None:
        """Add an observation to a histogram. Raises `UnsupportedError` for other kinds."""
        self._metric.observe(value)


_logger = logging.getLogger("neso")


class ServerLog:
    """Log handler between `open` and `close`: writes to `log_file` or standard error; nothing by default."""

    def __init__(self, options: Options) -> None:
        self._level = _log_level(options)
        self._file = options.log_file
        iso = options.log_format is LogFormat.ISO8601
        self._format = make_formatter(NesoFormat.ISO8601 if iso else NesoFormat.DEFAULT)
        self._handler: logging.Handler | None = None
        self._before = logging.NOTSET

    def open(self) -> None:
        """Install the handler. Raises `OSError` if the log file cannot be written."""
        if self._level is None:
            self._handler = logging.NullHandler()
        else:
            self._handler = logging.FileHandler(self._file) if self._file else logging.StreamHandler()
            self._handler.setLevel(self._level)
            self._handler.setFormatter(self._format)
            self._before = _logger.level
            _logger.setLevel(min(self._level, _logger.getEffectiveLevel()))
        _logger.addHandler(self._handler)

    def close(self) -> None:
        """Remove the handler and restore the log level. Idempotent."""
        handler, self._handler = self._handler, None
        if handler is not None:
            _logger.removeHandler(handler)
            handler.close()
            if self._level is not None:
                _logger.setLevel(self._before)


def _log_level(options: Options) -> int | None:
    """Return the lowest level to log; None to log nothing. As in Triton, a level includes all more severe levels."""
    if options.log_verbose:
        return logging.DEBUG
    if options.log_info:
        return logging.INFO
    if options.log_warn:
        return logging.WARNING
    return logging.ERROR if options.log_error else None


_FILE = "file:"


class ModelDictionary(dict[tuple[str, int], Model]):
    """Models by (name, version). A name alone selects the newest ready version."""

    def __init__(self, server: Server, models: Iterable[Model]) -> None:
        super().__init__({(model.name, model.version): model for model in models})
        self._server = server

    def __getitem__(self, key: tuple[str, int] | str) -> Model:
        if isinstance(key, tuple):
            if key in self:
                return super().__getitem__(key)
        elif any(name == key for name, _ in self):
            return Model(self._server, key)
        raise KeyError(f"Unknown Model: {key}")


class Server:
    """An in-process server. Methods raise `InvalidArgumentError` while the server is not running."""

    def __init__(self, options: Options | None = None, **fields: Any) -> None:
        self.options = options if options is not None else Options(**fields)
        self._server: NesoServer | None = None
        self._log: ServerLog | None = None

    @property
    def neso(self) -> NesoServer:
        """The underlying Neso server. Raises `InvalidArgumentError` while it is not running."""
        if self._server is None:
            raise InvalidArgument("Server not started")
        return self._server

    def start(
        self, wait_until_ready: bool = False, polling_interval: float = 0.1, timeout: float | None = None
    ) -> Server:
        """Start the server and load the models. `polling_interval` is ignored: readiness is not polled.

        Raises `TypeError` and `InvalidArgumentError` for invalid options, `InternalError` if a repository or (with
        `exit_on_error`) a model cannot be loaded and, with `wait_until_ready`, `UnavailableError` if the server is
        not ready after loading or after `timeout` seconds.
        """
        if self._server is not None:
            raise InvalidArgument("Server already started")
        server = NesoServer(self.options.to_neso())
        server.core.metrics.register(process_metrics)
        log = ServerLog(self.options)
        log.open()
        try:
            self._load(server, wait_until_ready, timeout if wait_until_ready else None)
        except BaseException:
            server.stop()
            log.close()
            raise
        self._server, self._log = server, log
        return self

    def stop(self) -> None:
        """Wait for requests in flight (up to `exit_timeout`), then unload the models."""
        server, self._server = self.neso, None
        server.stop()
        if self._log is not None:
            self._log.close()

    def __enter__(self) -> Server:
        return self if self._server is not None else self.start(wait_until_ready=True)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._server is not None:
            self.stop()

    def live(self) -> bool:
        """Return whether the server is running."""
        return self.neso.live()

    def ready(self) -> bool:
        """Return whether the server and, with `strict_readiness`, its models are ready."""
        return self.neso.ready()

    def metadata(self) -> dict[str, Any]:
        """Return name, version and extensions."""
        found = asdict(self.neso.metadata())
        return {**found, "extensions": list(found["extensions"])}

    def metrics(self, metric_format: MetricFormat = MetricFormat.PROMETHEUS) -> str:
        """Return all metrics in Prometheus text format."""
        return self.neso.metrics()

    def model(self, model_name: str, model_version: int = -1) -> Model:
        """Return a model by name. Existence is checked on use."""
        return Model(self, model_name, model_version)

    def models(self, exclude_not_ready: bool = False) -> ModelDictionary:
        """Return the models in the repositories with their states."""
        return ModelDictionary(
            self,
            [
                Model(
                    self,
                    entry.name,
                    int(entry.version or -1),
                    entry.state.value if entry.state is not None else None,
                    entry.reason or None,
                )
                for entry in self.neso.index(exclude_not_ready)
            ],
        )

    def load(self, model_name: str, parameters: dict[str, str | int | bool | bytes] | None = None) -> Model:
        """Load or reload a model. Raises `TritonError`.

        `parameters`: `config` (JSON text) and `file:PATH` (bytes).
        """
        config: str | None = None
        files: dict[str, bytes] = {}
        for name, value in (parameters or {}).items():
            if name == "config" and isinstance(value, str):
                config = value
            elif name.startswith(_FILE) and isinstance(value, bytes):
                files[name.removeprefix(_FILE)] = value
            else:
                raise InvalidArgument(
                    f"load parameter '{name}' cannot be {type(value).__name__}, expected config: str or "
                    "file:PATH: bytes"
                )
        self.neso.load(model_name, config, files or None)
        return self.model(model_name)

    def unload(
        self,
        model: str | Model,
        unload_dependents: bool = False,
        wait_until_unloaded: bool = False,
        polling_interval: float = 0.1,
        timeout: float | None = None,
    ) -> None:
        """Unload a model after its requests in flight have ended. Always waits, so the last three are ignored."""
        self.neso.unload(model.name if isinstance(model, Model) else model, unload_dependents)

    def register_model_repository(
        self, repository_path: str, name_mapping: dict[str, str] | None = None
    ) -> None:
        """Add a repository in mode EXPLICIT. Raises `TritonError`.

        `name_mapping`: model names by folder name.
        """
        self.neso.register_model_repository(repository_path, name_mapping)

    def unregister_model_repository(self, repository_path: str) -> None:
        """Remove a repository in mode EXPLICIT. Raises `TritonError`."""
        self.neso.unregister_model_repository(repository_path)

    def poll_model_repository(self) -> None:
        """Scan the repositories in mode POLL; load, reload and unload models accordingly. Raises `TritonError`."""
        self.neso.poll_model_repository()

    def _load(self, server: NesoServer, wait_until_ready: bool, timeout: float | None) -> None:
        try:
            server.start(wait_until_ready=True, timeout=timeout)
        except NotFound as error:
            raise InternalError(error.message) from None
        except TimeoutError:
            raise Unavailable("Timeout before ready") from None
        failed = [
            f"{entry.name} version {entry.version or '-'}: {entry.reason}"
            for entry in server.index()
            if entry.state is ModelState.UNAVAILABLE
        ]
        if failed and self.options.exit_on_error:
            raise InternalError("failed to load all models: " + "; ".join(failed))
        if wait_until_ready and not server.ready():
            raise Unavailable("the server is not ready: " + "; ".join(failed))

"""Triton's server."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from types import TracebackType
from typing import Any

from neso.compat.tritonserver.enums import MetricFormat
from neso.compat.tritonserver.log import Log
from neso.compat.tritonserver.metrics import process_metrics
from neso.compat.tritonserver.model import Model
from neso.compat.tritonserver.options import Options
from neso.server.errors import InternalError, InvalidArgument, NotFound, Unavailable
from neso.server.inprocess import Server as NesoServer
from neso.server.metadata import ModelState

_FILE = "file:"


class ModelDictionary(dict[tuple[str, int], Model]):
    """Models by name and version; a name alone gives the newest version that is ready."""

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
    """An in-process server, by Triton's names. Raises `InvalidArgumentError` for calls while it does not run."""

    def __init__(self, options: Options | None = None, **fields: Any) -> None:
        self.options = options if options is not None else Options(**fields)
        self._server: NesoServer | None = None
        self._log: Log | None = None

    @property
    def neso(self) -> NesoServer:
        """Neso's server below this one. Raises `InvalidArgumentError` while it does not run."""
        if self._server is None:
            raise InvalidArgument("Server not started")
        return self._server

    def start(
        self, wait_until_ready: bool = False, polling_interval: float = 0.1, timeout: float | None = None
    ) -> Server:
        """Start, and load the models; nothing is polled for, whatever the interval.

        Raises `TypeError` and `InvalidArgumentError` for the options, `InternalError` for a repository or, with
        `exit_on_error`, a model that cannot be loaded; with `wait_until_ready`, `UnavailableError` for a server that
        is not ready then or after `timeout` seconds.
        """
        if self._server is not None:
            raise InvalidArgument("Server already started")
        server = NesoServer(self.options.to_neso())
        server.core.metrics.register(process_metrics)
        log = Log(self.options)
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
        """Let requests in flight end (`exit_timeout`), and unload the models."""
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
        """Whether the server answers."""
        return self.neso.live()

    def ready(self) -> bool:
        """Whether the models that were to be loaded can be used."""
        return self.neso.ready()

    def metadata(self) -> dict[str, Any]:
        """Name, version and extensions."""
        found = asdict(self.neso.metadata())
        return {**found, "extensions": list(found["extensions"])}

    def metrics(self, metric_format: MetricFormat = MetricFormat.PROMETHEUS) -> str:
        """All metrics, in Prometheus' text format."""
        return self.neso.metrics()

    def model(self, model_name: str, model_version: int = -1) -> Model:
        """A model, which is looked for when it is used."""
        return Model(self, model_name, model_version)

    def models(self, exclude_not_ready: bool = False) -> ModelDictionary:
        """The models of the repositories, with their states."""
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
        """Load or reload a model; parameters are `config` (JSON) and `file:PATH` (bytes). Raises `TritonError`."""
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
        """Unload a model when its requests in flight have ended, which is waited for in any case."""
        self.neso.unload(model.name if isinstance(model, Model) else model, unload_dependents)

    def register_model_repository(
        self, repository_path: str, name_mapping: dict[str, str] | None = None
    ) -> None:
        """Add a repository, in mode EXPLICIT; `name_mapping` has new names by folder. Raises `TritonError`."""
        self.neso.register_model_repository(repository_path, name_mapping)

    def unregister_model_repository(self, repository_path: str) -> None:
        """Forget a repository, in mode EXPLICIT. Raises `TritonError`."""
        self.neso.unregister_model_repository(repository_path)

    def poll_model_repository(self) -> None:
        """Load and unload by what the repositories hold now, in mode POLL. Raises `TritonError`."""
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

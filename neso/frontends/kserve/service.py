"""The KServe v2 protocol and Triton's extensions, independent of the wire format.

bytes ─▶ http_codec / grpc_codec ─▶ KServeService ─▶ Model.submit ─▶ responses ─▶ codec ─▶ bytes
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from neso.frontends.header_forwarding import HeaderForwarding
from neso.server.core import Core
from neso.server.errors import InvalidArgument, Unsupported
from neso.server.inference_request import InferenceRequest
from neso.server.inference_response import ResponseStream
from neso.server.metadata import IndexEntry, ModelMetadata, ServerMetadata
from neso.server.model import Model
from neso.server.tracing import Trace

Value = TypeVar("Value")
Headers = Callable[[], Iterable[tuple[str, str]]]
"""Returns name and value of each request header; called only if headers are forwarded."""


class KServeService:
    """All operations of the protocol. They raise `ServerError`. Runs on the event loop of `core`.

    `shared_memory`: the registered regions; changed by `change_shared_memory`. `tracing.enabled`: whether `start_trace`
    may return a trace.
    """

    def __init__(self, core: Core, header_forwarding: HeaderForwarding | None = None) -> None:
        self._core = core
        self._header_forwarding = header_forwarding
        self.shared_memory = core.shared_memory
        self.tracing = core.tracing

    # Health and metadata.

    def live(self) -> bool:
        return self._core.live()

    def ready(self) -> bool:
        return self._core.ready()

    async def model_ready(self, name: str, version: str = "") -> bool:
        """Whether the model is loaded and reports itself ready; False for unknown models."""
        return await self._core.check_model_ready(name, version)

    def server_metadata(self) -> ServerMetadata:
        return self._core.metadata()

    def model_metadata(self, name: str, version: str = "") -> ModelMetadata:
        return self._core.model(name, version).metadata()

    def model_config(self, name: str, version: str = "") -> Any:
        """Return the `inference.ModelConfig` message of a model."""
        return self._core.model(name, version).config

    async def statistics(self, name: str = "", version: str = "") -> list[dict[str, Any]]:
        """Return `ModelStatistics` of a version, of all ready versions of a model, or of all models."""
        return await self._core.model_statistics(name, version)

    # Model repository.

    async def repository_index(self, repository: str, ready_only: bool) -> list[IndexEntry]:
        _reject_repository_name(repository)
        return await self._core.list_repository(ready_only)

    async def load_model(
        self, repository: str, name: str, config: str | None, files: dict[str, bytes]
    ) -> None:
        """Load or reload a model. `config`: JSON that replaces config.pbtxt; `files`: contents by path."""
        _reject_repository_name(repository)
        await self._core.load_model(name, config, files or None)

    async def unload_model(self, repository: str, name: str, unload_dependents: bool) -> None:
        """Unload a model. `unload_dependents`: also unload models that only this model needs."""
        _reject_repository_name(repository)
        await self._core.unload_model(name, unload_dependents)

    # Trace and log settings.

    async def trace_settings(
        self, model: str = "", changes: Mapping[str, Sequence[str]] | None = None
    ) -> dict[str, str | list[str]]:
        """Apply `changes` and return the settings of a model or the server. An empty value clears a setting."""
        return await self._core.change_trace_settings(model, changes)

    async def log_settings(self, changes: dict[str, Any] | None = None) -> dict[str, Any]:
        """Apply `changes` and return the log settings."""
        return await self._core.change_log_settings(changes)

    async def change_shared_memory(self, operation: str, *arguments: Any) -> None:
        """Call a method of `shared_memory` that registers or removes regions."""
        self.shared_memory.check_enabled()
        await self._core.change_shared_memory(operation, *arguments)

    # Inference.

    def find_model(self, name: str, version: str = "") -> Model:
        return self._core.model(name, version)

    def find_unary_model(self, name: str, version: str, api: str) -> Model:
        """Return a model that sends one response per request. `api` names the caller in the error message."""
        model = self._core.model(name, version)
        if model.decoupled:
            raise Unsupported(f"{api} doesn't support models with decoupled transaction policy")
        return model

    def submit(
        self, model: Model, request: InferenceRequest, headers: Headers, trace: Trace | None
    ) -> ResponseStream:
        """Submit a request to its model, with the forwarded headers and the trace. Raises `ServerError`."""
        self.forward_headers(request, headers)
        request.trace = trace
        return model.submit(request)

    def forward_headers(self, request: InferenceRequest, headers: Headers) -> None:
        """Add the forwarded headers to the parameters of a request."""
        if self._header_forwarding is not None:
            request.parameters.update(self._header_forwarding.parameters(headers()))

    def start_trace(
        self,
        model: str,
        header: Callable[[str], str | None],
        received_ns: int,
        stamps: tuple[str, str],
    ) -> Trace | None:
        """Return a trace if the request is sampled. Call only if `tracing.enabled`.

        `header` returns the value of a request header. `received_ns`: monotonic time when the first byte was
        received, recorded as the first of `stamps`; the second is the current time.
        """
        if not self._core.model_ready(model):
            return None
        trace = self.tracing.sample(model, header, received_ns)
        if trace is not None:
            trace.stamp(stamps[0], trace.started)
            trace.stamp(stamps[1])
        return trace

    def kv_cache_load(self) -> tuple[float, int] | None:
        """Return KV cache utilization (0 to 1) and capacity in tokens of all models, None without a KV cache."""
        load = self._core.kv_cache_load()
        return None if load is None else (load.utilization, load.max_tokens)


def finish_trace(trace: Trace, protocol: str) -> None:
    """End a trace. The caller must write the response before the event loop continues."""
    trace.sending(protocol)
    asyncio.get_running_loop().call_soon(trace.sent, protocol)


def parse_load_parameters(
    parameters: Mapping[str, Value],
    read_config: Callable[[str, Value], str],
    read_file: Callable[[str, Value], bytes],
) -> tuple[str | None, dict[str, bytes]]:
    """Return configuration and files (contents by path) of a load request. Raises `InvalidArgument`."""
    config: str | None = None
    files: dict[str, bytes] = {}
    for key, value in parameters.items():
        if key == "config":
            config = read_config(key, value)
        elif key.startswith("file:"):
            files[key.removeprefix("file:")] = read_file(key, value)
        else:
            raise InvalidArgument(f"unrecognized load parameter '{key}', expected 'config' or 'file:<path>'")
    return config, files


def _reject_repository_name(repository: str) -> None:
    if repository:
        raise Unsupported("'repository_name' specification is not supported")

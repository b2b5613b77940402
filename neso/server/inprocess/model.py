"""Models of the in-process API."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from neso.server.config.model_config import config_to_dict
from neso.server.errors import ServerError
from neso.server.inprocess.requests import (
    AsyncResponseIterator,
    InferenceRequest,
    InferenceResponse,
    InFlightRequest,
    ResponseIterator,
    Responses,
)
from neso.server.metadata import IndexEntry, ModelMetadata, ModelState
from neso.server.model import Model as CoreModel

if TYPE_CHECKING:
    from neso.server.inprocess.server import Server


class Model:
    """A model name and version that requests are sent to. Looked up for each request, so reloads take effect.

    Version "" selects the newest ready version. `state` and `reason` come from the repository index. All methods
    raise `ServerError` for an unknown model.
    """

    def __init__(
        self,
        server: Server,
        name: str,
        version: str = "",
        state: ModelState | None = None,
        reason: str = "",
    ) -> None:
        self._server = server
        self.name = name
        self.version = version
        self.state = state
        self.reason = reason

    def __repr__(self) -> str:
        return f"Model({self.name!r}, {self.version!r})"

    def ready(self) -> bool:
        """Return whether requests can be executed now."""
        try:
            return self._server.wait_for(
                self._server.running_core().check_model_ready(self.name, self.version)
            )
        except ServerError:
            return False

    def metadata(self) -> ModelMetadata:
        """Return names, datatypes and shapes of inputs and outputs."""
        return self._server.call(lambda core: core.model(self.name, self.version).metadata())

    def config(self) -> dict[str, Any]:
        """Return the completed configuration, with the field names of config.pbtxt."""
        return config_to_dict(self._server.call(lambda core: core.model(self.name, self.version).config))

    def statistics(self) -> dict[str, Any]:
        """Return counters and durations, with the field names of the statistics extension."""
        return self._server.call(lambda core: core.model(self.name, self.version).statistics.snapshot())

    def create_request(self, **fields: Any) -> InferenceRequest:
        """Create a request to this model; keywords are the fields of `InferenceRequest`."""
        return InferenceRequest(self, **fields)

    def infer(
        self, request: InferenceRequest | None = None, *, raise_on_error: bool = True, **fields: Any
    ) -> ResponseIterator[InferenceResponse]:
        """Send an `InferenceRequest` (or its fields as keywords) and return an iterator over the responses.

        Raises `InvalidArgument` if the request does not match the model's signature.
        """
        request = self._request(request, fields)
        responses = ResponseIterator(
            request.response_factory(), raise_on_error=raise_on_error, copies=request.response_queue
        )
        self.send(request, responses)
        return responses

    def async_infer(
        self, request: InferenceRequest | None = None, *, raise_on_error: bool = True, **fields: Any
    ) -> AsyncResponseIterator[InferenceResponse]:
        """Like `infer`, for the running event loop: `async for response in model.async_infer(…)`."""
        request = self._request(request, fields)
        responses = AsyncResponseIterator(
            request.response_factory(), raise_on_error=raise_on_error, copies=request.response_queue
        )
        self.send(request, responses)
        return responses

    def send(self, request: InferenceRequest, responses: Responses[Any]) -> None:
        """Send a request, with responses to `responses`. Raises `ServerError` if it does not match the model."""
        if responses.blocks:
            self._server.check_may_wait()
        # Convert in the caller's thread: long lists would block the server's loop.
        core_request = request.to_core(self._find(), self.version)
        responses.in_flight = submitted = InFlightRequest(self._server, core_request, responses.deliver)
        request.track(submitted)
        submitted.start()

    def _request(self, request: InferenceRequest | None, fields: dict[str, Any]) -> InferenceRequest:
        if request is None:
            return InferenceRequest(self, **fields)
        if fields:
            raise TypeError(f"expected either a request or fields, got both: {', '.join(fields)}")
        return request

    def _find(self) -> CoreModel:
        core = self._server.running_core()
        try:
            if model := core.model(self.name, self.version):
                return model
        except Exception:
            pass  # the loop may be replacing the model right now: look it up on the loop
        return self._server.call(lambda core: core.model(self.name, self.version))


class Models(Mapping[tuple[str, str], Model]):
    """Maps `(name, version)` to a model, and a name to the newest ready version of the model."""

    def __init__(self, server: Server, entries: Iterable[IndexEntry]) -> None:
        self._server = server
        self._models = {
            (entry.name, entry.version): Model(server, entry.name, entry.version, entry.state, entry.reason)
            for entry in entries
        }

    def __getitem__(self, key: str | tuple[str, str | int]) -> Model:
        if isinstance(key, tuple):
            name, version = key
            return self._models[name, str(version)]
        if any(name == key for name, _ in self._models):
            return Model(self._server, key)
        raise KeyError(key)

    def __iter__(self) -> Iterator[tuple[str, str]]:
        return iter(self._models)

    def __len__(self) -> int:
        return len(self._models)

    def __repr__(self) -> str:
        return f"Models({list(self._models)!r})"

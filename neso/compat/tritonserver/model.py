"""Triton's model."""

from __future__ import annotations

from copy import copy
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from neso.compat.tritonserver.enums import ModelBatchFlag, ModelTxnPropertyFlag
from neso.compat.tritonserver.request import InferenceRequest
from neso.compat.tritonserver.response import InferenceResponse
from neso.server.inprocess import AsyncResponseIterator, ResponseIterator
from neso.server.inprocess import Model as NesoModel

if TYPE_CHECKING:
    from neso.compat.tritonserver.server import Server


class Model:
    """A name and a version, -1 for the newest that is ready. Checked when it is used."""

    def __init__(
        self,
        server: Server,
        name: str,
        version: int = -1,
        state: str | None = None,
        reason: str | None = None,
    ) -> None:
        self._server = server.neso
        self.neso = NesoModel(self._server, name, "" if version == -1 else str(version))
        self.name = name
        self.version = version
        self.state = state
        self.reason = reason

    def __repr__(self) -> str:
        return str({"name": self.name, "version": self.version, "state": self.state})

    def at(self, version: str) -> Model:
        """The same model in another version; also when the server has stopped."""
        made = copy(self)
        if version:
            made.neso, made.version = NesoModel(self._server, self.name, version), int(version)
        return made

    def create_request(self, **fields: Any) -> InferenceRequest:
        """A request to this model; keywords are the fields of `InferenceRequest`."""
        return InferenceRequest(**{**fields, "model": self})

    def infer(
        self,
        inference_request: InferenceRequest | None = None,
        raise_on_error: bool = True,
        **fields: Any,
    ) -> ResponseIterator[InferenceResponse]:
        """Send a request. Raises `TritonError`, `InvalidArgumentError` if it does not fit the model."""
        request = inference_request or self.create_request(**fields)
        responses = ResponseIterator(
            request.respond, raise_on_error=raise_on_error, flag_only=True, copies=request.response_queue
        )
        self.neso.send(request.to_neso(), responses)
        return responses

    def async_infer(
        self,
        inference_request: InferenceRequest | None = None,
        raise_on_error: bool = True,
        **fields: Any,
    ) -> AsyncResponseIterator[InferenceResponse]:
        """`infer` for the running event loop."""
        request = inference_request or self.create_request(**fields)
        responses = AsyncResponseIterator(
            request.respond, raise_on_error=raise_on_error, flag_only=True, copies=request.response_queue
        )
        self.neso.send(request.to_neso(), responses)
        return responses

    def ready(self) -> bool:
        """Whether requests can be executed now."""
        return self.neso.ready()

    def metadata(self) -> dict[str, Any]:
        """Name, versions, platform, inputs and outputs, as the protocol has them."""
        found = asdict(self.neso.metadata())
        for tensor in (*found["inputs"], *found["outputs"]):
            tensor["shape"] = list(tensor["shape"])
        return found

    def config(self, config_version: int = 1) -> dict[str, Any]:
        """The completed configuration, by the names of config.pbtxt."""
        return self.neso.config()

    def statistics(self) -> dict[str, Any]:
        """Counters and durations, as the statistics extension has them."""
        return {"model_stats": [self.neso.statistics()]}

    def batch_properties(self) -> ModelBatchFlag:
        """Whether the first dimension is that of a batch."""
        batches = self.config().get("max_batch_size", 0) > 0
        return ModelBatchFlag.FIRST_DIM if batches else ModelBatchFlag.UNKNOWN

    def transaction_properties(self) -> ModelTxnPropertyFlag:
        """Whether a request has one response, or any number."""
        decoupled = self.config().get("model_transaction_policy", {}).get("decoupled", False)
        return ModelTxnPropertyFlag.DECOUPLED if decoupled else ModelTxnPropertyFlag.ONE_TO_ONE

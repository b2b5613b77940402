"""Requests of a front-end process that the main process executes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import neso.server.processes.messages as wire
from neso.server.admission import RESERVATION
from neso.server.backlog import Backlog
from neso.server.inference_request import InferenceRequest
from neso.server.inference_response import ResponseStream
from neso.server.model import Model
from neso.server.signature import Signature

if TYPE_CHECKING:
    from neso.server.processes.channel import Channel
    from neso.server.processes.front_end_core import FrontEndCore
    from neso.server.processes.state import ModelDescription


class Forwarder:
    """Sends requests to the main process, and its responses to their streams."""

    def __init__(self, max_response_backlog: int) -> None:
        self._backlog_limit = max_response_backlog
        self._streams: dict[int, ResponseStream] = {}
        self._paused: set[int] = set()
        self.channel: Channel

    def submit(
        self, request: InferenceRequest, version: str, namespace: str, *, streams: bool
    ) -> ResponseStream:
        """Forward a request. `streams`: there can be several responses. Raises `InvalidArgument`."""
        channel = self.channel
        number = channel.next_number()
        channel.send(wire.pack_request(number, request, version, namespace))
        request.model_version = version
        stream = ResponseStream(request, backlog=Backlog(self._backlog_limit) if streams else None)
        self._streams[number] = stream
        request.on_cancel(lambda: channel.send(wire.encoder.encode(wire.Cancel(number))))
        return stream

    def receive(self, message: wire.Message) -> None:
        """Deliver a response of the main process."""
        assert isinstance(message, wire.Response)
        number = message.number
        stream = self._streams.pop(number, None) if message.final else self._streams.get(number)
        if stream is None:
            return
        stream.send(wire.unpack_response(message))
        if message.final:
            self._paused.discard(number)
        elif stream.congested and number not in self._paused:
            assert stream.backlog is not None
            self._paused.add(number)
            self.channel.send(wire.encoder.encode(wire.Flow(number, True)))
            stream.backlog.on_room(lambda: self._resume(number))

    def _resume(self, number: int) -> None:
        if number in self._paused:
            self._paused.discard(number)
            self.channel.send(wire.encoder.encode(wire.Flow(number, False)))


class ForwardedModel(Model):
    """A model of the main process: its requests are executed there, with its statistics, limits and caches.

    Only what the frontends use is available.
    """

    def __init__(self, core: FrontEndCore, description: ModelDescription, config: Any) -> None:
        self.name, self.version = description.name, description.version
        self.directory, self.version_directory = description.directory, description.version_directory
        self.versions = [description.version]
        self.config = config
        self.decoupled = bool(config.model_transaction_policy.decoupled)
        self.signature = Signature(config)
        self.admission = core.admission
        self.source = None
        self._forwarder = core.forwarder
        self._namespace = description.namespace
        self._front_end, self._key = core, description.key

    language_model = None
    pooling_model = None

    def ready(self) -> bool:
        return self._front_end.is_ready(self._key)

    @property
    def text_inputs(self) -> dict[str, type]:
        return {}

    def read_text_request(self, request: InferenceRequest, values: Any) -> None:
        return None

    def submit(self, request: InferenceRequest) -> ResponseStream:
        """Forward a request to the main process. Its errors are sent as responses."""
        if (reservation := RESERVATION.get()) is not None:
            reservation.take(1)
        return self._forwarder.submit(request, self.version, self._namespace, streams=self.decoupled)

    def retire(self, successor: Model | None = None) -> None:
        """Nothing to do: the main process forwards requests to the successor."""

    async def drain(self, timeout: float | None) -> bool:
        """Nothing to do: the main process waits for the requests in flight."""
        return True

    async def unload(self, timeout: float | None) -> None:
        """Nothing to do, see `drain`."""

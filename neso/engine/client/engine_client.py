"""Client of one engine: requests in flight, input and output processing, abort, LoRA changes.

`LLM` connects it to an engine core in the same process, `AsyncEngine` to an engine process over a channel.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from itertools import groupby
from operator import attrgetter
from pathlib import Path

from neso.engine.client.input_processor import InputProcessor
from neso.engine.client.output_processor import PooledState, RequestState
from neso.engine.config import EngineConfig
from neso.engine.core.request import SequenceOutput
from neso.engine.core.stats import EngineStats
from neso.engine.ipc.messages import (
    SERVER,
    Abort,
    Add,
    Command,
    EngineInfo,
    Event,
    ExtendLease,
    LoadLora,
    LoraDone,
    LoraNames,
    ReleaseLease,
    StepOutputs,
    UnloadLora,
    Unsendable,
    client_prefix,
)
from neso.engine.text.tokenizer import NO_TOKENIZER, EngineTokenizer, Tokenizer
from neso.engine.vision.image_prompt import ImagePrompt
from neso.generation import (
    GenerationOutput,
    GenerationRequest,
    InvalidParameter,
    LoraRequest,
    PooledOutput,
    PoolingRequest,
)

Output = GenerationOutput | PooledOutput
Deliver = Callable[[Output | Exception], object]
"""Receives the outputs of a request; the last one is finished or an error."""


def load_engine_tokenizer(config: EngineConfig) -> EngineTokenizer:
    """Load the tokenizer selected by the options. Raises `TokenizerError`."""
    return NO_TOKENIZER if config.skip_tokenizer_init else Tokenizer.from_model(Path(config.tokenizer_path))


class EngineClient:
    """Requests in flight of one engine.

    `send` sends a command to the engine and raises `Unsendable`; `handle` is called with its events. `client`: number
    of this client in the engine.
    """

    def __init__(
        self,
        send: Callable[[Command], None],
        info: EngineInfo,
        tokenizer: EngineTokenizer,
        images: ImagePrompt | None = None,
        client: int = SERVER,
    ) -> None:
        self.info = info
        self._prefix = client_prefix(client)
        self.text = tokenizer
        self.stats = EngineStats(num_blocks=info.num_blocks)
        self._send = send
        self._input = InputProcessor(tokenizer, info, images)
        self._requests: dict[str, tuple[RequestState | PooledState, Deliver]] = {}
        self._ids = itertools.count()
        self._loras: dict[str, str | None] = dict(info.lora.lora_modules)
        self._lora_changes: dict[int, Callable[[str], object]] = {}

    @property
    def num_requests(self) -> int:
        """Number of requests in flight."""
        return len(self._requests)

    def process(self, request: GenerationRequest | PoolingRequest) -> RequestState | PooledState:
        """Tokenize and check a request. Thread-safe; see `is_slow`. Raises `InvalidParameter`."""
        name = request.request_id or f"request-{next(self._ids)}"
        if name.startswith("\0"):
            raise InvalidParameter("request_id", "must not begin with a NUL character")
        if self._prefix or not request.request_id:
            request = replace(request, request_id=f"{self._prefix}{name}")
        if isinstance(request, PoolingRequest):
            return PooledState(self._input.process_pooling(request))
        tokenizer = self.text if request.detokenize else NO_TOKENIZER
        return RequestState(self._input.process(request), tokenizer, request.tracer)

    def submit(self, state: RequestState | PooledState, deliver: Deliver) -> None:
        """Send a request to the engine. Raises `InvalidParameter` for a duplicate id."""
        request_id = state.request.request_id
        if request_id in self._requests:
            raise InvalidParameter("request_id", f"'{request_id}' is in flight already")
        self._requests[request_id] = state, deliver
        try:
            self._send(Add(state.request))
        except Unsendable as error:
            del self._requests[request_id]
            raise InvalidParameter("request", f"holds what cannot be sent: {error}") from None

    def abort(self, state: RequestState | PooledState) -> None:
        """Abort a request; does nothing if it is not in flight."""
        request_id = state.request.request_id
        entry = self._requests.get(request_id)
        if entry is not None and entry[0] is state:
            try:
                self._send(Abort(request_id))  # workers report what they have done of a traced request
            finally:
                del self._requests[request_id]

    def extend_lease(self, transfer_id: str, lease_seconds: float) -> None:
        """Keep the blocks of a `KvExport` for `lease_seconds` from now on; ignored if the lease has ended."""
        self._send(ExtendLease(transfer_id, lease_seconds))

    def release_lease(self, transfer_id: str) -> None:
        """Free the blocks of a `KvExport`; ignored if the lease has ended."""
        self._send(ReleaseLease(transfer_id))

    def list_loras(self) -> dict[str, str | None]:
        """Return the names of the loaded adapters, each with the path it was loaded from, if any."""
        return dict(self._loras)

    def change_lora(self, change: LoraRequest | str, done: Callable[[str], object]) -> int:
        """Load an adapter, or unload one by name; `done` is called with "" or an error message.

        Returns the change's number.
        """
        number = next(self._ids)
        self._lora_changes[number] = done
        try:
            self._send(UnloadLora(number, change) if isinstance(change, str) else LoadLora(number, change))
        except Unsendable:
            del self._lora_changes[number]
            raise
        return number

    def handle(self, event: Event) -> None:
        """Process an event of the engine."""
        if isinstance(event, StepOutputs):
            self.stats = event.stats
            self.dispatch(event.outputs)
        elif isinstance(event, LoraNames):
            self._loras = event.names
        elif isinstance(event, LoraDone) and event.number in self._lora_changes:
            self._lora_changes.pop(event.number)(event.message)

    def dispatch(self, outputs: list[SequenceOutput]) -> None:
        """Process the outputs of a step and deliver them to their requests."""
        # The outputs of one request are adjacent: the scheduler keeps its sequences together.
        for request_id, group in groupby(outputs, key=attrgetter("request_id")):
            entry = self._requests.get(request_id)
            if entry is None:
                continue
            state, deliver = entry
            try:
                output = state.process(list(group))
            except Exception as error:
                self.abort(state)
                deliver(error)
                continue
            for index in state.stopped:
                self._send(Abort(request_id, index))
            if state.finished:
                del self._requests[request_id]
            if output is not None:
                deliver(output)

    def fail_all(self, error: Exception) -> None:
        """Fail all requests and LoRA changes in flight."""
        requests, self._requests = self._requests, {}
        for _, deliver in requests.values():
            deliver(error)
        changes, self._lora_changes = self._lora_changes, {}
        for done in changes.values():
            done(str(error))

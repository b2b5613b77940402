"""The engine as a server sees it: a language model whose steps run elsewhere."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import replace
from itertools import groupby
from typing import cast

from neso.engine.client.input_processor import InputProcessor
from neso.engine.client.output_processor import RequestState, stopped_by_text
from neso.engine.config import EngineConfig
from neso.engine.core.request import SequenceOutput
from neso.engine.core.stats import EngineStats
from neso.engine.errors import EngineDead, EngineError
from neso.engine.ipc.channel import EngineChannel, Unsendable, open_channel
from neso.engine.ipc.messages import (
    Abort,
    Add,
    CheckIntegrity,
    EngineInfo,
    Integrity,
    LoadFailed,
    LoadLora,
    LoraDone,
    LoraNames,
    StepOutputs,
    UnloadLora,
)
from neso.engine.open_tokenizer import EngineText, open_tokenizer
from neso.engine.pooling.input import PoolingInput
from neso.engine.pooling.pooled_state import PooledState
from neso.engine.text.tokenizer import NO_TOKENIZER
from neso.engine.text.tokenizer_files import TokenizerError
from neso.engine.vision.image_prompt import ImagePrompt, open_image_prompt
from neso.generation import (
    GenerationOutput,
    GenerationRequest,
    InvalidParameter,
    LoraRequest,
    PooledOutput,
    PoolingInfo,
    PoolingRequest,
    SamplingDefaults,
)

OutputSink = Callable[[GenerationOutput | PooledOutput | Exception], None]
"""Receives the outputs of one request on the event loop; an exception is the last."""

LONG_INPUT = 8192
"""Characters or tokens from which an input is read in a thread: it takes milliseconds, and the loop would stand."""


class AsyncEngine:
    """A `LanguageModel` over the channel to an engine; made by `start`, on the event loop that uses it."""

    def __init__(
        self,
        channel: EngineChannel,
        info: EngineInfo,
        tokenizer: EngineText,
        images: ImagePrompt | None = None,
    ) -> None:
        self.info = info
        self.stats = EngineStats(num_blocks=info.num_blocks)
        self.text = tokenizer
        self._channel = channel
        self._input = InputProcessor(tokenizer, info, images)
        self._pooling_input = PoolingInput(tokenizer, info)
        self._requests: dict[str, tuple[RequestState | PooledState, OutputSink]] = {}
        self._names = itertools.count()
        self._loras: dict[str, str | None] = dict(info.lora.lora_modules)
        self._lora_changes: dict[int, asyncio.Future[str]] = {}
        self._integrity: asyncio.Future[Integrity] | None = None
        self._reader = asyncio.create_task(self._read(), name="engine-reader")
        self._on_dead: list[Callable[[str], None]] = []
        self._on_stats: list[Callable[[EngineStats], None]] = []
        channel.dead.add_done_callback(lambda dead: self._fail_all(dead.result()))

    @classmethod
    async def start(cls, config: EngineConfig, *, in_process: bool = False) -> AsyncEngine:
        """Start an engine and wait until its model is loaded. Raises `EngineError` with the reason why not."""
        channel = open_channel(config, in_process=in_process)
        try:
            # The tokenizer loads here while the weights load there.
            tokenizer = await asyncio.to_thread(open_tokenizer, config)
            event = await channel.receive_first()
            if not isinstance(event, EngineInfo):
                raise EngineError(event.message if isinstance(event, LoadFailed) else f"unexpected {event}")
            images = open_image_prompt(config.model, event.vision)
        except BaseException as error:
            # An engine that is still loading has nothing to lose, and does not listen.
            await channel.close(timeout=0)
            if isinstance(error, TokenizerError):
                raise EngineError(str(error)) from None
            raise
        return cls(channel, event, tokenizer, images)

    @property
    def max_model_len(self) -> int:
        return self.info.max_model_len

    @property
    def default_sampling(self) -> SamplingDefaults:
        return self.info.default_sampling

    @property
    def alive(self) -> bool:
        """Whether requests can be served."""
        return not self._channel.dead.done()

    @property
    def num_requests(self) -> int:
        """Requests in flight."""
        return len(self._requests)

    def on_dead(self, callback: Callable[[str], None]) -> None:
        """Call `callback(reason)` if the engine ends without being told to."""
        self._on_dead.append(callback)

    def on_stats(self, callback: Callable[[EngineStats], None]) -> None:
        """Call `callback(stats)` after every step."""
        self._on_stats.append(callback)

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[GenerationOutput, None]:
        """See `LanguageModel.generate`."""
        if is_long(request):
            state = await asyncio.to_thread(self.process, request)
        else:
            state = self.process(request)
        async with aclosing(self._follow(state)) as outputs:
            async for output in outputs:
                yield cast(GenerationOutput, output)

    @property
    def pooling(self) -> PoolingInfo | None:
        return self.info.pooling

    async def pool(self, request: PoolingRequest) -> PooledOutput:
        """See `PoolingModel.pool`."""
        if is_long(request):
            state = await asyncio.to_thread(self.process, request)
        else:
            state = self.process(request)
        async with aclosing(self._follow(state)) as outputs:
            async for output in outputs:
                return cast(PooledOutput, output)
        raise EngineError("the engine gave no vector")

    def process(self, request: GenerationRequest | PoolingRequest) -> RequestState | PooledState:
        """Check and tokenize a request. Thread-safe; slow if `is_long(request)`. Raises `InvalidParameter`."""
        request = replace(request, request_id=request.request_id or f"request-{next(self._names)}")
        if isinstance(request, PoolingRequest):
            return PooledState(self._pooling_input.process(request))
        self._check_lora_path(request)
        return RequestState(self._input.process(request), self.text if request.detokenize else NO_TOKENIZER)

    def submit(self, state: RequestState | PooledState, sink: OutputSink) -> None:
        """Send a processed request to the engine; `sink` is called with each output or with the error that ends it.

        Raises `EngineDead`, and `InvalidParameter` for a duplicate id or for values that cannot be serialized.
        """
        name = state.request.request_id
        if not self.alive:
            raise EngineDead(self._channel.dead.result())
        if name in self._requests:
            raise InvalidParameter("request_id", f"'{name}' is in flight already")
        try:
            self._channel.send(Add(state.request))
        except Unsendable as error:
            raise InvalidParameter("request", f"holds what cannot be sent: {error}") from None
        self._requests[name] = state, sink

    def abort(self, request_id: str) -> None:
        """End a request: its sink is not called again, its blocks are free before the next step. Idempotent."""
        if self._requests.pop(request_id, None) is not None:
            self._channel.send(Abort(request_id))

    async def _follow(
        self, state: RequestState | PooledState
    ) -> AsyncGenerator[GenerationOutput | PooledOutput, None]:
        """Submit a request and yield its outputs; closing the iterator aborts it."""
        outputs: asyncio.Queue[GenerationOutput | PooledOutput | Exception] = asyncio.Queue()
        self.submit(state, outputs.put_nowait)
        try:
            while True:
                output = await outputs.get()
                if isinstance(output, Exception):
                    raise output
                yield output
                if output.finished:
                    return
        finally:
            self.abort(state.request.request_id)

    async def check_integrity(self) -> EngineStats:
        """Have the engine check its books. Raises `EngineError` if they do not balance."""
        if self._integrity is None:
            self._integrity = asyncio.get_running_loop().create_future()
            self._channel.send(CheckIntegrity())
        result = await asyncio.shield(self._integrity)
        if result.message:
            raise EngineError(result.message)
        return result.stats

    def list_loras(self) -> dict[str, str | None]:
        """The adapters that requests can name, with the paths of those that were loaded from one."""
        return dict(self._loras)

    async def load_lora(self, lora: LoraRequest) -> None:
        """Load an adapter; one that has its name serves on until this one is there. Raises `EngineError`."""
        await self._change_lora(lambda number: LoadLora(number, lora))

    async def unload_lora(self, name: str) -> None:
        """Forget an adapter; requests in flight end with it. Raises `EngineError` if there is none."""
        await self._change_lora(lambda number: UnloadLora(number, name))

    async def _change_lora(self, command: Callable[[int], LoadLora | UnloadLora]) -> None:
        if not self.alive:
            raise EngineDead(self._channel.dead.result())
        number = next(self._names)
        try:
            self._channel.send(command(number))
        except Unsendable as error:
            raise EngineError(f"the adapter holds what cannot be sent: {error}") from None
        self._lora_changes[number] = asyncio.get_running_loop().create_future()
        try:
            message = await self._lora_changes[number]
        finally:
            del self._lora_changes[number]
        if message:
            raise EngineError(message)

    def _check_lora_path(self, request: GenerationRequest) -> None:
        """A path in a request has the server read its own disk."""
        lora = request.lora
        if lora is not None and lora.path is not None and not self.info.lora.allow_runtime_lora:
            raise InvalidParameter(
                "lora_path", "this engine loads no adapters for clients (allow_runtime_lora)"
            )

    async def stop(self, timeout: float = 5.0) -> None:
        """End the engine; requests in flight fail with `EngineDead`."""
        self._on_dead.clear()
        self._reader.cancel()
        await self._channel.close(timeout)

    async def _read(self) -> None:
        while True:
            event = await self._channel.receive()
            if isinstance(event, StepOutputs):
                self.stats = event.stats
                for callback in self._on_stats:
                    callback(event.stats)
                self._dispatch(event.outputs)
            elif isinstance(event, Integrity) and self._integrity is not None:
                self.stats = event.stats
                self._integrity.set_result(event)
                self._integrity = None
            elif isinstance(event, LoraNames):
                self._loras = event.names
            elif isinstance(event, LoraDone):
                change = self._lora_changes.get(event.number)
                if change is not None and not change.done():
                    change.set_result(event.message)

    def _dispatch(self, outputs: list[SequenceOutput]) -> None:
        # The scheduler keeps the sequences of a request together; a step's outputs of one are one message.
        for name, group in groupby(outputs, key=lambda output: output.request_id):
            entry = self._requests.get(name)
            if entry is None:
                continue
            state, sink = entry
            mine = list(group)
            try:
                result = state.process(mine)
            except Exception as error:
                del self._requests[name]
                self._channel.send(Abort(name))
                sink(error)
                continue
            if isinstance(state, RequestState):
                for index in stopped_by_text(mine, state):
                    self._channel.send(Abort(name, index))
            if state.finished:
                del self._requests[name]
            if result is not None:
                sink(result)

    def _fail_all(self, reason: str) -> None:
        self._reader.cancel()
        requests, self._requests = self._requests, {}
        for _, sink in requests.values():
            sink(EngineDead(reason))
        if self._integrity is not None:
            self._integrity.set_exception(EngineDead(reason))
            self._integrity = None
        for change in self._lora_changes.values():
            if not change.done():
                change.set_exception(EngineDead(reason))
        for callback in self._on_dead:
            callback(reason)


def is_long(request: GenerationRequest | PoolingRequest) -> bool:
    """Whether `AsyncEngine.process` may take milliseconds (long text, arrays, images) and belongs in a thread."""
    if isinstance(request, PoolingRequest):
        return len(request.prompt) > LONG_INPUT or isinstance(request.prompt, tuple)
    params = request.sampling
    arrays = (request.prompt_embeds, request.prompt_embedding_table, request.draft)
    lists = (request.prompt, params.allowed_token_ids or (), params.logit_bias, params.stop_token_ids)
    return (
        bool(request.images or params.bad_words or params.stop_words or params.embedding_bias)
        or any(value is not None for value in arrays)
        or any(len(values) > LONG_INPUT for values in lists)
    )

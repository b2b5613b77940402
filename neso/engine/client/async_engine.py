"""Asynchronous engine client for the server: a `LanguageModel` connected to an engine process by a channel."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable

from neso.engine.client.engine_client import Deliver, EngineClient, Output, load_engine_tokenizer
from neso.engine.client.input_processor import InputProcessor
from neso.engine.client.output_processor import PooledState, RequestState
from neso.engine.config import EngineConfig
from neso.engine.core.stats import EngineStats
from neso.engine.errors import EngineDead, EngineError
from neso.engine.ipc.channel import EngineChannel, open_channel
from neso.engine.ipc.messages import (
    CheckIntegrity,
    Command,
    EngineInfo,
    Event,
    Integrity,
    LoadFailed,
    StepOutputs,
    Unsendable,
)
from neso.engine.text.tokenizer import EngineTokenizer
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

logger = logging.getLogger(__name__)

LARGE_INPUT = 8192
"""Number of characters or tokens above which an input is processed in a thread, because it takes milliseconds."""


class AsyncEngine(EngineClient):
    """A `LanguageModel` and `PoolingModel` connected to an engine by a channel.

    Created by `start`; bound to its event loop. When the engine ends unexpectedly, the requests in flight fail, and
    `restart` can start it again.
    """

    def __init__(
        self,
        config: EngineConfig,
        channel: EngineChannel,
        info: EngineInfo,
        tokenizer: EngineTokenizer,
        images: ImagePrompt | None = None,
        *,
        in_process: bool = False,
    ) -> None:
        super().__init__(self._send_command, info, tokenizer, images)
        self._config, self._in_process = config, in_process
        self._images = images
        self._integrity: asyncio.Future[Integrity] | None = None
        self._on_dead: list[Callable[[str], None]] = []
        self._on_stats: list[Callable[[EngineStats], None]] = []
        self._runtime_loras: dict[str, LoraRequest] = {}  # adapters loaded by `load_lora`
        self._lost_loras: dict[str, str | None] | None = None  # adapters to restore after a restart
        self._earlier_stats: EngineStats | None = None  # of the engines before a restart
        self._connect(channel)

    @classmethod
    async def start(cls, config: EngineConfig, *, in_process: bool = False) -> AsyncEngine:
        """Start an engine and wait until its model is loaded. Raises `EngineError` if it cannot be loaded."""
        # Load the tokenizer while the engine process loads the weights.
        loading = asyncio.ensure_future(asyncio.to_thread(load_engine_tokenizer, config))
        channel, info = await _open(config, in_process, loading)
        try:
            images = open_image_prompt(config.model, info.vision, config.max_image_pixels)
        except BaseException:
            await channel.close(timeout=0)
            raise
        return cls(config, channel, info, loading.result(), images, in_process=in_process)

    async def restart(self) -> EngineInfo:
        """Start the engine again after it has ended, with the same options and adapters. Raises `EngineError`.

        Returns its properties; the size of its cache can be different. Adapters are those that were loaded when it
        ended, except those loaded from tensors of a request. An adapter that can no longer be loaded is logged and left
        out.
        """
        assert not self.alive, "the engine is running"
        await self._channel.close(timeout=0)
        if self._lost_loras is None:
            self._lost_loras = self._loras
        channel, info = await _open(self._config, self._in_process)
        self.info = info
        self._input = InputProcessor(self.text, info, self._images)
        self._loras = dict(info.lora.lora_modules)
        self._connect(channel)
        self._restoring = True
        try:
            await self._restore_loras(self._lost_loras)
        except BaseException:
            await channel.close(timeout=0)
            raise
        self._lost_loras = None
        self._restoring = False
        return info

    def _connect(self, channel: EngineChannel) -> None:
        self._channel = channel
        self._restoring = False
        reader = asyncio.create_task(self._read(channel), name="engine-reader")
        self._reader = reader
        channel.dead.add_done_callback(lambda dead: self._fail(dead.result(), reader))

    async def _restore_loras(self, loras: dict[str, str | None]) -> None:
        started = self.info.lora.lora_modules
        changes: list[LoraRequest | str] = [name for name in started if name not in loras]
        for name, path in loras.items():
            if name in self._runtime_loras:
                changes.append(self._runtime_loras[name])
            elif path is not None and path != started.get(name):
                changes.append(LoraRequest(name=name, path=path))
        for change in changes:
            try:
                await self._change_lora(change)
            except EngineDead:
                raise
            except EngineError as error:
                name = change if isinstance(change, str) else change.name
                logger.error("adapter '%s' cannot be restored after a restart: %s", name, error)

    def _send_command(self, command: Command) -> None:
        self._channel.send(command)

    @property
    def max_model_len(self) -> int:
        return self.info.max_model_len

    @property
    def default_sampling(self) -> SamplingDefaults:
        return self.info.default_sampling

    @property
    def pooling(self) -> PoolingInfo | None:
        return self.info.pooling

    @property
    def alive(self) -> bool:
        """Whether the engine is running and accepts requests."""
        return not self._channel.dead.done() and not self._restoring

    def on_dead(self, callback: Callable[[str], None]) -> None:
        """Call `callback(reason)` if the engine ends unexpectedly."""
        self._on_dead.append(callback)

    def on_stats(self, callback: Callable[[EngineStats], None]) -> None:
        """Call `callback(stats)` after every step."""
        self._on_stats.append(callback)

    def process(self, request: GenerationRequest | PoolingRequest) -> RequestState | PooledState:
        """Tokenize and check a request. Thread-safe; see `is_slow`. Raises `InvalidParameter`."""
        lora = request.lora if isinstance(request, GenerationRequest) else None
        if lora is not None and lora.path is not None and not self.info.lora.allow_runtime_lora:
            # A path would make the engine read files of the server.
            raise InvalidParameter(
                "lora_path", "this engine loads no adapters for clients (allow_runtime_lora)"
            )
        return super().process(request)

    def submit(self, state: RequestState | PooledState, deliver: Deliver) -> None:
        """Send a request to the engine. Raises `EngineDead`, `InvalidParameter` for a duplicate id."""
        self._check_alive()
        super().submit(state, deliver)

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[GenerationOutput, None]:
        """See `LanguageModel.generate`."""
        state, outbox = await self._start(request)
        try:
            while True:
                output = await outbox.get()
                if isinstance(output, GenerationOutput):
                    yield output
                    if output.finished:
                        return
                elif isinstance(output, Exception):
                    raise output
        finally:
            self.abort(state)

    async def pool(self, request: PoolingRequest) -> PooledOutput:
        """See `PoolingModel.pool`."""
        state, outbox = await self._start(request)
        try:
            output = await outbox.get()
            if isinstance(output, Exception):
                raise output
            assert isinstance(output, PooledOutput)
            return output
        finally:
            self.abort(state)

    async def _start(
        self, request: GenerationRequest | PoolingRequest
    ) -> tuple[RequestState | PooledState, asyncio.Queue[Output | Exception]]:
        """Process and submit a request; returns its state and the queue of its outputs."""
        if is_slow(request):
            state = await asyncio.to_thread(self.process, request)
        else:
            state = self.process(request)
        outbox: asyncio.Queue[Output | Exception] = asyncio.Queue()
        self.submit(state, outbox.put_nowait)
        return state, outbox

    async def check_integrity(self) -> EngineStats:
        """Check the KV-cache accounting. Raises `EngineError` if it is inconsistent or the engine has ended."""
        self._check_alive()
        if self._integrity is None:
            self._integrity = asyncio.get_running_loop().create_future()
            self._send(CheckIntegrity())
        result = await asyncio.shield(self._integrity)
        if result.message:
            raise EngineError(result.message)
        return result.stats

    async def load_lora(self, lora: LoraRequest) -> None:
        """Load an adapter; the current one of the same name serves until it is loaded. Raises `EngineError`."""
        self._check_alive()
        await self._change_lora(lora)
        self._runtime_loras[lora.name] = lora

    async def unload_lora(self, name: str) -> None:
        """Unload an adapter; requests in flight finish with it. Raises `EngineError` if it does not exist."""
        self._check_alive()
        await self._change_lora(name)
        self._runtime_loras.pop(name, None)

    async def _change_lora(self, change: LoraRequest | str) -> None:
        results: asyncio.Queue[str] = asyncio.Queue()
        try:
            number = self.change_lora(change, results.put_nowait)
        except Unsendable as error:
            raise EngineError(f"the adapter holds what cannot be sent: {error}") from None
        try:
            message = await results.get()
        finally:
            self._lora_changes.pop(number, None)
        self._check_running()
        if message:
            raise EngineError(message)

    def _check_alive(self) -> None:
        self._check_running()
        if self._restoring:
            raise EngineDead("the engine process has ended")

    def _check_running(self) -> None:
        if self._channel.dead.done():
            raise EngineDead(self._channel.dead.result())

    async def stop(self, timeout: float = 5.0) -> None:
        """Stop the engine; requests in flight fail with `EngineDead`."""
        self._on_dead.clear()
        self._reader.cancel()
        await self._channel.close(timeout)

    async def _read(self, channel: EngineChannel) -> None:
        while True:
            self.handle(await channel.receive())

    def handle(self, event: Event) -> None:
        """Process an event of the engine."""
        if isinstance(event, Integrity):
            event = Integrity(event.message, self._total(event.stats))
            self.stats = event.stats
            if self._integrity is not None:
                self._integrity.set_result(event)
                self._integrity = None
            return
        if isinstance(event, StepOutputs):
            event = StepOutputs(event.outputs, self._total(event.stats))
            for callback in self._on_stats:
                callback(event.stats)
        super().handle(event)

    def _total(self, stats: EngineStats) -> EngineStats:
        """Add the counters of the engines before a restart."""
        return stats if self._earlier_stats is None else stats.after(self._earlier_stats)

    def _fail(self, reason: str, reader: asyncio.Task[None]) -> None:
        """Fail all requests in flight after the engine has ended, and reset the gauges of its statistics."""
        reader.cancel()
        self._earlier_stats = self.stats
        self.stats = EngineStats(num_blocks=self.info.num_blocks).after(self.stats)
        self.fail_all(EngineDead(reason))
        if self._integrity is not None:
            self._integrity.set_exception(EngineDead(reason))
            self._integrity = None
        if not self._restoring:  # otherwise `restart` raises
            for callback in self._on_dead:
                callback(reason)


async def _open(
    config: EngineConfig, in_process: bool, loading: asyncio.Future[EngineTokenizer] | None = None
) -> tuple[EngineChannel, EngineInfo]:
    """Start an engine and wait until its model and, if given, the tokenizer are loaded. Raises `EngineError`."""
    channel = open_channel(config, in_process=in_process)
    try:
        if loading is not None:
            await loading
        event = await channel.receive_first()
        if not isinstance(event, EngineInfo):
            raise EngineError(event.message if isinstance(event, LoadFailed) else f"unexpected {event}")
    except BaseException as error:
        # Kill the engine without a grace period: an engine that is still loading does not read commands.
        await channel.close(timeout=0)
        if isinstance(error, TokenizerError):
            raise EngineError(str(error)) from None
        raise
    return channel, event


def is_slow(request: GenerationRequest | PoolingRequest) -> bool:
    """Whether `AsyncEngine.process` can take milliseconds (long texts or lists, arrays, images): run it in a thread."""
    if isinstance(request, PoolingRequest):
        return len(request.prompt) > LARGE_INPUT or isinstance(request.prompt, tuple)
    params = request.sampling
    arrays = (request.prompt_embeds, request.prompt_embedding_table, request.draft)
    lists = (request.prompt, params.allowed_token_ids or (), params.logit_bias, params.stop_token_ids)
    return (
        bool(request.images or params.bad_words or params.stop_words or params.embedding_bias)
        or any(value is not None for value in arrays)
        or any(len(values) > LARGE_INPUT for values in lists)
    )

"""Asynchronous engine client for the server: a `LanguageModel` connected to an engine process by a channel."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable

from neso.engine.client.async_requests import AsyncRequests
from neso.engine.client.engine_client import Deliver, EngineClient, load_engine_tokenizer
from neso.engine.client.input_processor import InputProcessor
from neso.engine.client.output_processor import PooledState, RequestState
from neso.engine.config import EngineConfig
from neso.engine.core.stats import EngineStats
from neso.engine.errors import EngineDead, EngineError
from neso.engine.ipc.attached_channel import AttachedChannel, Attachment
from neso.engine.ipc.channel import EngineChannel, ProcessChannel, open_channel
from neso.engine.ipc.messages import (
    SERVER,
    Attach,
    CheckIntegrity,
    Command,
    Detach,
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
    GenerationRequest,
    InvalidParameter,
    LoraRequest,
    PoolingRequest,
)

logger = logging.getLogger(__name__)


class AsyncEngine(EngineClient, AsyncRequests):
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
        client: int = SERVER,
    ) -> None:
        super().__init__(self._send_command, info, tokenizer, images, client)
        self._config, self._in_process = config, in_process
        self._images = images
        self._attach: Attachment | None = None  # None for the process that has started the engine
        self._integrity: asyncio.Future[Integrity] | None = None
        self._on_dead: list[Callable[[str], None]] = []
        self._on_stats: list[Callable[[EngineStats], None]] = []
        self._runtime_loras: dict[str, LoraRequest] = {}  # adapters loaded by `load_lora`
        self._lost_loras: dict[str, str | None] | None = None  # adapters to restore after a restart
        self._earlier_stats: EngineStats | None = None  # of the engines before a restart
        self._connect(channel)

    @classmethod
    async def start(
        cls,
        config: EngineConfig,
        *,
        in_process: bool = False,
        tokenizer: asyncio.Future[EngineTokenizer] | None = None,
    ) -> AsyncEngine:
        """Start an engine and wait until its model is loaded. Raises `EngineError` if it cannot be loaded.

        `tokenizer`: the tokenizer if it is shared with other engines.
        """
        # Load the tokenizer while the engine process loads the weights.
        loading = tokenizer or asyncio.ensure_future(asyncio.to_thread(load_engine_tokenizer, config))
        channel, info = await _open(config, in_process, loading)
        try:
            images = open_image_prompt(config.model, info.vision, config.image_limits)
        except BaseException:
            await channel.close(timeout=0)
            raise
        return cls(config, channel, info, loading.result(), images, in_process=in_process)

    @classmethod
    async def connect(
        cls, config: EngineConfig, attach: Attachment, tokenizer: asyncio.Future[EngineTokenizer]
    ) -> AsyncEngine:
        """Use the engine of another process, which restarts it. Raises `EngineError`, `ServerError`."""
        channel, info = await _open_attached(attach)
        try:
            images = open_image_prompt(config.model, info.vision, config.image_limits)
            text = await tokenizer
        except BaseException as error:
            await channel.close(timeout=0)
            if isinstance(error, TokenizerError):
                raise EngineError(str(error)) from None
            raise
        engine = cls(config, channel, info, text, images, client=channel.client)
        engine._attach = attach
        return engine

    async def _reconnect(self, attach: Attachment) -> EngineInfo:
        """Connect to the engine again when the other process has restarted it. Raises `EngineError`, `ServerError`."""
        channel, self.info = await _open_attached(attach)
        self._input = InputProcessor(self.text, self.info, self._images)
        self._connect(channel)
        return self.info

    @property
    def config(self) -> EngineConfig:
        """The options of the engine."""
        return self._config

    @property
    def can_be_attached(self) -> bool:
        """Whether other processes can use the engine."""
        return isinstance(self._channel, ProcessChannel)

    def client_address(self) -> str:
        """Return a new address for another process. Raises `EngineDead`."""
        self._check_alive()
        assert isinstance(self._channel, ProcessChannel)
        return self._channel.client_address()

    def attach(self, client: int, address: str) -> None:
        """Let another process, which listens at `address`, use the engine. Raises `EngineDead`."""
        self._check_alive()
        self._send(Attach(client, address))

    def detach(self, client: int) -> None:
        """Abort the requests of another process."""
        self._send(Detach(client))

    async def restart(self) -> EngineInfo:
        """Start the engine again after it has ended, with the same options and adapters. Raises `EngineError`.

        Returns its properties; the size of its cache can be different. Adapters are those that were loaded when it
        ended, except those loaded from tensors of a request. An adapter that can no longer be loaded is logged and left
        out.
        """
        assert not self.alive, "the engine is running"
        await self._channel.close(timeout=0)
        if self._attach is not None:
            return await self._reconnect(self._attach)
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

    async def catch_up(self, changes: Iterable[LoraRequest | str]) -> None:
        """Make changes of adapters that were requested while the engine was restarted; errors are logged."""
        for change in changes:
            try:
                await (self.unload_lora(change) if isinstance(change, str) else self.load_lora(change))
            except EngineDead:
                raise
            except EngineError as error:
                logger.error("a change of adapters cannot be made after a restart: %s", error)

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
        # First the callbacks: the errors of the requests tell whether the engine is restarted.
        if not self._restoring:  # otherwise `restart` raises
            for callback in self._on_dead:
                callback(reason)
        self.fail_all(EngineDead(reason))
        if self._integrity is not None:
            self._integrity.set_exception(EngineDead(reason))
            self._integrity = None


async def _open(
    config: EngineConfig, in_process: bool, loading: asyncio.Future[EngineTokenizer] | None = None
) -> tuple[EngineChannel, EngineInfo]:
    """Start an engine and wait until its model and, if given, the tokenizer are loaded. Raises `EngineError`."""
    channel = open_channel(config, in_process=in_process)
    try:
        if loading is not None:
            await loading
        info = await _first_info(channel)
    except BaseException as error:
        # Kill the engine without a grace period: an engine that is still loading does not read commands.
        await channel.close(timeout=0)
        if isinstance(error, TokenizerError):
            raise EngineError(str(error)) from None
        raise
    return channel, info


async def _open_attached(attach: Attachment) -> tuple[AttachedChannel, EngineInfo]:
    """Connect to an engine of another process. Raises `EngineError`, `ServerError`."""
    channel = await AttachedChannel.open(attach)
    try:
        return channel, await _first_info(channel)
    except BaseException:
        await channel.close(timeout=0)
        raise


async def _first_info(channel: EngineChannel) -> EngineInfo:
    """Return the properties of the model when it is loaded. Raises `EngineError`."""
    event = await channel.receive_first()
    if not isinstance(event, EngineInfo):
        raise EngineError(event.message if isinstance(event, LoadFailed) else f"unexpected {event}")
    return event

"""The backend `tensorrtllm`: TensorRT-LLM's Triton model, token ids in and out, on Neso's engine."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Iterable, Iterator, Mapping
from contextlib import aclosing
from itertools import repeat
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from neso.backends.llm.engine_backend import EngineBackend
from neso.backends.llm.tensor_request import adapter_of_task
from neso.backends.tensorrtllm import signature
from neso.backends.tensorrtllm.settings import Settings, read_settings
from neso.backends.tensorrtllm.token_request import RequestReader, TokenRequest, named_as_here
from neso.backends.tensorrtllm.token_response import AnswerFormat, RequestAnswer, RowAnswer
from neso.engine.config import EngineConfig
from neso.generation import InvalidParameter, LoraRequest
from neso.server.backend import ModelContext
from neso.server.errors import InvalidArgument
from neso.server.inference_response import ResponseStream
from neso.server.tensor import DataType

logger = logging.getLogger(__name__)


class TensorRtLlmBackend(EngineBackend):
    """See `signature`. Each row of a batch is a request to the engine; a request with `stop` ends one by its id.

    Of `dynamic_batching`, only the queue size applies: batching is in-flight.
    """

    implemented_fields = frozenset({"dynamic_batching"})

    def __init__(self, context: ModelContext) -> None:
        super().__init__(context)
        self._settings: Settings | None = None
        self._running = RunningRequests()

    @classmethod
    def auto_complete(
        cls, config: Any, directory: Path, version_directory: Path, backend_config: Mapping[str, str]
    ) -> None:
        signature.complete(config)

    def engine_config(self) -> EngineConfig:
        context = self.context
        self._settings = read_settings(context.config, context.version_directory, context.directory)
        for warning in self._settings.warnings:
            logger.warning("model '%s': %s", context.name, warning)
        return self._settings.engine

    async def load(self) -> None:
        await super().load()
        assert self._settings is not None, "the engine's configuration comes from it"
        if not self.engine.info.generates:
            await self.unload()
            raise InvalidArgument(
                "gpt_model_path: the model gives vectors: serve it by the backend 'embedding'"
            )
        config = self.context.config
        batched = bool(config.max_batch_size)
        self._reader = RequestReader(
            self._settings, batched=batched, decoupled=config.model_transaction_policy.decoupled
        )
        logits = {
            tensor.name: DataType.of_message(tensor)
            for tensor in config.output
            if tensor.name in ("context_logits", "generation_logits")
        }
        self._format = AnswerFormat(batched, self.engine.info.block_size, logits)
        if self._settings.lora_prefetch_dir is not None:
            await self._load_adapters(self._settings.lora_prefetch_dir)

    async def _load_adapters(self, directory: Path) -> None:
        """Load what `lora_prefetch_dir` holds, or nothing at all."""
        try:
            for adapter in await asyncio.to_thread(lambda: list(read_adapters(directory))):
                await self.load_lora(adapter)
        except InvalidArgument as error:
            await self.unload()
            raise InvalidArgument(f"lora_prefetch_dir: {error.message}") from None

    def submit(self, stream: ResponseStream) -> None:
        request = stream.request
        if self._reader.stops(request):
            if not request.id:
                raise InvalidArgument("stop: needs the id of the request that is to end")
            self._running.stop(request.id)
            stream.finish()
            return
        rows = self._reader.rows(request)
        running = RunningRequest()
        self._running.add(request.id, running)
        task = self.run_task(stream, self._run(stream, rows, running))
        task.add_done_callback(lambda _: self._running.remove(request.id, running))

    async def _run(self, stream: ResponseStream, rows: list[TokenRequest], running: RunningRequest) -> None:
        answer = RequestAnswer(self.context, stream, rows, self._format)
        try:
            running.begin()
            if len(rows) == 1:
                await self._generate_row(rows[0], answer, answer.rows[0])
            else:
                await _all(map(self._generate_row, rows, repeat(answer), answer.rows))
        except asyncio.CancelledError:
            if not running.stopped:
                raise
            answer.end()
        except InvalidParameter as error:
            raise named_as_here(error) from None

    async def _generate_row(self, request: TokenRequest, answer: RequestAnswer, row: RowAnswer) -> None:
        async with aclosing(self.generate(request.generation)) as outputs:
            async for output in outputs:
                answer.take(row, output)


async def _all(work: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Do all of it, or nothing more once some of it fails."""
    tasks = [asyncio.ensure_future(part) for part in work]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class RunningRequest:
    """One that can be stopped: `stopped` is True then, and its task is cancelled once it has begun."""

    def __init__(self) -> None:
        self.stopped = False
        self._task: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """The current task works on it. Raises `CancelledError` if it is stopped already."""
        self._task = asyncio.current_task()
        if self.stopped:
            raise asyncio.CancelledError

    def stop(self) -> None:
        """A task that has not begun is not cancelled: it would end without a word."""
        self.stopped = True
        if self._task is not None:
            self._task.cancel()


class RunningRequests:
    """Ids need not be unique: those that are alike are stopped together. Without an id a request cannot be."""

    def __init__(self) -> None:
        self._by_id: dict[str, set[RunningRequest]] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def add(self, id: str, request: RunningRequest) -> None:
        if id:
            self._by_id.setdefault(id, set()).add(request)

    def remove(self, id: str, request: RunningRequest) -> None:
        """It has ended."""
        requests = self._by_id.get(id, set())
        requests.discard(request)
        if not requests:
            self._by_id.pop(id, None)

    def stop(self, id: str) -> None:
        """Stop the requests of this id; there may be none, they may have ended."""
        for request in tuple(self._by_id.get(id, ())):
            request.stop()


def read_adapters(directory: Path) -> Iterator[LoraRequest]:
    """Those of the folders whose names are numbers. Raises `InvalidArgument` that names the file."""
    for folder in sorted(path for path in directory.iterdir() if path.is_dir() and path.name.isdecimal()):
        weights, config = (_read_array(folder / f"model.lora_{what}.npy") for what in ("weights", "config"))
        try:
            yield adapter_of_task(int(folder.name), weights, config)
        except InvalidArgument as error:
            raise InvalidArgument(f"{folder}: {error.message}") from None


def _read_array(path: Path) -> npt.NDArray[Any]:
    try:
        array: npt.NDArray[Any] = np.load(path)
    except (OSError, ValueError) as error:
        raise InvalidArgument(f"{path}: cannot be read: {error}") from None
    return array

"""`TensorRtLlmBackend`: TensorRT-LLM's Triton model `tensorrt_llm` (token ids in and out) on Neso's engine."""

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
from neso.backends.llm.launched_ranks import check_participants, with_launched_ranks
from neso.backends.llm.submitted_request import with_queue_delay
from neso.backends.llm.tensor_request import adapter_of_task
from neso.backends.tensorrtllm import signature
from neso.backends.tensorrtllm.settings import Settings, read_settings
from neso.backends.tensorrtllm.token_request import (
    RequestReader,
    TokenEmbeddings,
    TokenRequest,
    convert_error,
)
from neso.backends.tensorrtllm.token_response import ResponseSender, RowResponses, TensorFormat
from neso.engine.config import EngineConfig
from neso.generation import InvalidParameter, LoraRequest
from neso.server.backend import ModelContext
from neso.server.errors import InvalidArgument
from neso.server.inference_request import InferenceRequest
from neso.server.inference_response import ResponseStream
from neso.server.tensor import DataType

logger = logging.getLogger(__name__)

MAX_WARNINGS = 100
"""Maximum number of different warnings about the requests of a model."""


class TensorRtLlmBackend(EngineBackend):
    """Each batch row is an engine request. A request with the input `stop` stops another request by its id.

    Of `dynamic_batching`, only `max_queue_size` is used: the engine batches requests in flight.
    """

    implemented_fields = frozenset({"dynamic_batching"})
    shares_tensors = False  # a request can stop another one by its id

    def __init__(self, context: ModelContext) -> None:
        super().__init__(context)
        self._settings: Settings | None = None
        self._running = RunningRequests()
        self._warned: set[str] = set()

    @classmethod
    def auto_complete(
        cls, config: Any, directory: Path, version_directory: Path, backend_config: Mapping[str, str]
    ) -> None:
        signature.complete(config)

    @classmethod
    def stops(cls, request: InferenceRequest) -> bool:
        tensor = request.inputs.get("stop")
        return request.parameters.get("stop") is True if tensor is None else bool(tensor.array.any())

    def engine_config(self) -> EngineConfig:
        context = self.context
        self._settings = read_settings(context.config, context.version_directory, context.directory)
        self.iteration_metrics = self._settings.iteration_metrics
        for warning in self._settings.warnings:
            logger.warning("model '%s': %s", context.name, warning)
        config = with_launched_ranks(self._settings.engine, context.name, context.backend_config)
        if self._settings.participants is not None:
            check_participants(self._settings.participants, config, self.num_instances)
        return config

    async def load(self) -> None:
        await super().load()
        assert self._settings is not None, "the engine's configuration comes from it"
        if not self.engine.info.generates:
            await self.unload()
            raise InvalidArgument(
                "gpt_model_path: the model is an embedding model; use the backend 'embedding'"
            )
        config = self.context.config
        batched = bool(config.max_batch_size)
        info = self.engine.info
        self._reader = RequestReader(
            self._settings,
            TokenEmbeddings(info.vocab_size, info.hidden_size, "input_embeddings" in info.capabilities),
            batched=batched,
            decoupled=config.model_transaction_policy.decoupled,
            warn=self._warn,
        )
        logits = {
            tensor.name: DataType.of_message(tensor)
            for tensor in config.output
            if tensor.name in ("context_logits", "generation_logits")
        }
        self._format = TensorFormat(batched, self.engine.info.block_size, logits)
        if self._settings.lora_prefetch_dir is not None:
            await self._load_adapters(self._settings.lora_prefetch_dir)

    async def _load_adapters(self, directory: Path) -> None:
        """Load the adapters in `lora_prefetch_dir`; unload the model on an error. Raises `InvalidArgument`."""
        try:
            for adapter in await asyncio.to_thread(lambda: list(read_adapters(directory))):
                await self.load_lora(adapter)
        except InvalidArgument as error:
            await self.unload()
            raise InvalidArgument(f"lora_prefetch_dir: {error.message}") from None

    def _warn(self, message: str) -> None:
        """Log a warning about a request once. The number is limited, because clients choose the names."""
        if message not in self._warned and len(self._warned) < MAX_WARNINGS:
            self._warned.add(message)
            logger.warning("model '%s': %s", self.context.name, message)

    def submit(self, stream: ResponseStream) -> None:
        request = stream.request
        self._reader.read_parameters(request)
        if self.stops(request):
            if not request.id:
                raise InvalidArgument("stop: needs the id of the request to stop")
            self._running.stop(request.id)
            stream.finish()
            return
        rows = self._reader.rows(request)
        stream.count_sequences(sum(row.generation.sampling.num_sequences for row in rows))
        running = RunningRequest()
        self._running.add(request.id, running)
        task = self.run_task(stream, self._run(stream, rows, running))
        task.add_done_callback(lambda _: self._running.remove(request.id, running))

    async def _run(self, stream: ResponseStream, rows: list[TokenRequest], running: RunningRequest) -> None:
        sender = ResponseSender(self.context, stream, rows, self._format)
        try:
            running.begin()
            if len(rows) == 1:
                await self._generate_row(rows[0], sender, sender.rows[0])
            else:
                await _all(map(self._generate_row, rows, repeat(sender), sender.rows))
        except asyncio.CancelledError:
            if not running.stopped:
                raise
            sender.end()
        except InvalidParameter as error:
            raise convert_error(error) from None

    async def _generate_row(self, request: TokenRequest, sender: ResponseSender, row: RowResponses) -> None:
        generation = with_queue_delay(request.generation, sender.stream)
        async with aclosing(self.generate(generation)) as outputs:
            async for output in outputs:
                sender.add(row, output)


async def _all(work: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Run coroutines concurrently. If one fails, cancel the rest."""
    tasks = [asyncio.ensure_future(part) for part in work]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class RunningRequest:
    """A request that can be stopped. Stopping sets `stopped` and cancels the task of the request, if started."""

    def __init__(self) -> None:
        self.stopped = False
        self._task: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """Register the current task. Raises `CancelledError` if the request was stopped before."""
        self._task = asyncio.current_task()
        if self.stopped:
            raise asyncio.CancelledError

    def stop(self) -> None:
        """Stop the request. A task that has not started is not cancelled, because it could not send a response."""
        self.stopped = True
        if self._task is not None:
            self._task.cancel()


class RunningRequests:
    """Requests in flight by id. Requests with the same id are stopped together."""

    def __init__(self) -> None:
        self._by_id: dict[str, set[RunningRequest]] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def add(self, id: str, request: RunningRequest) -> None:
        if id:
            self._by_id.setdefault(id, set()).add(request)

    def remove(self, id: str, request: RunningRequest) -> None:
        """Remove an ended request."""
        requests = self._by_id.get(id, set())
        requests.discard(request)
        if not requests:
            self._by_id.pop(id, None)

    def stop(self, id: str) -> None:
        """Stop the requests with this id, if any."""
        for request in tuple(self._by_id.get(id, ())):
            request.stop()


def read_adapters(directory: Path) -> Iterator[LoraRequest]:
    """Read TensorRT-LLM's prefetch directory: one folder per task id. Raises `InvalidArgument`.

    DIRECTORY/7/model.lora_weights.npy    [1, rows, width]
    DIRECTORY/7/model.lora_config.npy     [1, rows, 3]
    """
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

"""Requests as asynchronous generators, on top of `process`, `submit` and `abort`; properties of the model."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator

from neso.engine.client.engine_client import Deliver, Output
from neso.engine.client.output_processor import PooledState, RequestState
from neso.engine.ipc.messages import EngineInfo
from neso.generation import (
    GenerationOutput,
    GenerationRequest,
    PooledOutput,
    PoolingInfo,
    PoolingRequest,
    SamplingDefaults,
)

LARGE_INPUT = 8192
"""Number of characters or tokens above which an input is processed in a thread, because it takes milliseconds."""


class AsyncRequests(ABC):
    """Implements the parts of `LanguageModel` and `PoolingModel` that need only `submit` and the model's properties."""

    info: EngineInfo

    @property
    def max_model_len(self) -> int:
        return self.info.max_model_len

    @property
    def default_sampling(self) -> SamplingDefaults:
        return self.info.default_sampling

    @property
    def pooling(self) -> PoolingInfo | None:
        return self.info.pooling

    @abstractmethod
    def process(self, request: GenerationRequest | PoolingRequest) -> RequestState | PooledState:
        """Tokenize and check a request. Thread-safe; see `is_slow`. Raises `InvalidParameter`."""

    @abstractmethod
    def submit(self, state: RequestState | PooledState, deliver: Deliver) -> None:
        """Send a request to an engine. Raises `EngineDead`, `InvalidParameter` for a duplicate id."""

    @abstractmethod
    def abort(self, state: RequestState | PooledState) -> None:
        """Abort a request; does nothing if it is not in flight."""

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

"""The engine for scripts: prompts in, texts out, no server."""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from neso.engine.client.input_processor import InputProcessor
from neso.engine.client.output_processor import RequestState, stopped_by_text
from neso.engine.config import EngineConfig
from neso.engine.core.request import SequenceOutput
from neso.engine.errors import EngineError
from neso.engine.load.loader import load_engine
from neso.engine.loop.engine_core import EngineCore
from neso.engine.lora.config import LORA_DISABLED
from neso.engine.lora.manager import LoraManager
from neso.engine.open_tokenizer import open_tokenizer
from neso.engine.pooling.input import PoolingInput
from neso.engine.pooling.pooled_state import PooledState
from neso.engine.prompts import Prompt, as_batch, request_for
from neso.engine.vision.image_prompt import open_image_prompt
from neso.engine.weights.hub import resolve_model
from neso.generation import (
    DraftTokens,
    GenerationOutput,
    GenerationRequest,
    InvalidParameter,
    LoraRequest,
    PooledOutput,
    PoolingParams,
    PoolingRequest,
    SamplingParams,
)
from neso.generation.pooling import Scoring
from neso.generation.request import split_images

PoolingPrompt = str | list[int] | tuple[str, str]
"""Text, token ids that are taken as they are, or a pair of texts."""

Lora = str | LoraRequest | None
"""An adapter by its name, or by a request that also says where it is."""


class LLM:
    """An engine in this process. Options are those of `EngineConfig` and `SchedulerConfig`, by name.

    >>> llm = LLM("path/to/checkpoint")
    >>> results = llm.generate(["Hello", "Hi"], SamplingParams(temperature=0, max_tokens=16))

    Raises `EngineError` when the model cannot be loaded, `ModelNotFound` when it is nowhere.
    """

    def __init__(self, model: str | Path, **options: Any) -> None:
        directory = resolve_model(model)
        config = EngineConfig.from_options(str(directory), options)
        self.tokenizer = open_tokenizer(config)
        self.core, self.info = load_engine(config)
        self._input = InputProcessor(
            self.tokenizer, self.info, open_image_prompt(directory, self.info.vision)
        )
        self._pooling_input = PoolingInput(self.tokenizer, self.info)
        self._names = itertools.count()
        self._in_flight: dict[str, _InFlight] = {}

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        lora: Lora | Sequence[Lora] = None,
        progress: bool = True,
        drafts: Sequence[DraftTokens | None] | None = None,
    ) -> list[GenerationOutput]:
        """Continue all prompts, batched in flight; outputs in the order of the prompts.

        One `SamplingParams` for all, or one each; None: see `get_default_sampling_params`. The same for `lora`, names
        of adapters or `LoraRequest`. `drafts`: what may follow each prompt. Raises `InvalidParameter` before anything
        runs if one is bad; a bad grammar or adapter is found when it is compiled or loaded, while other prompts run
        already.
        """
        batch = as_batch(prompts)
        requests = self._requests_for(batch, sampling, lora)
        if drafts is not None:
            requests = [replace(r, draft=draft) for r, draft in zip(requests, drafts, strict=True)]
        messages: dict[str, list[GenerationOutput]] = {request.request_id: [] for request in requests}
        with _progress_bar(len(batch), shown=progress) as advance:
            for output in self._run(requests):
                messages[output.request_id].append(output)
                advance(len(output.outputs), output.finished)
        return [
            GenerationOutput.joined(parts, prompt)
            for parts, prompt in zip(messages.values(), batch, strict=True)
        ]

    def stream(
        self, prompt: Prompt, sampling: SamplingParams | None = None, *, lora: Lora = None
    ) -> Iterator[GenerationOutput]:
        """Continue one prompt and give every step's output as it comes. Closing the iterator aborts."""
        yield from self._run(self._requests_for([prompt], sampling, lora))

    def chat(
        self,
        messages: list[dict[str, Any]],
        sampling: SamplingParams | None = None,
        *,
        lora: Lora = None,
        **template: Any,
    ) -> GenerationOutput:
        """Answer a conversation, by the model's chat template.

        Images are content parts of type "image_url" (with a data: URL) or "image" (with what a request takes).
        """
        messages, images = split_images(messages)
        prompt = self.tokenizer.apply_chat_template(messages, **template)
        ids = self.tokenizer.encode(prompt, add_special_tokens=False)
        (result,) = self.generate([{"prompt": ids, "images": images}], sampling, lora=lora, progress=False)
        return replace(result, prompt=ids)

    def get_default_sampling_params(self) -> SamplingParams:
        """What prompts without any have: the values of the checkpoint's generation_config.json, where it has some."""
        return self.info.default_sampling.params()

    def load_lora(self, name: str, path: str | Path) -> None:
        """Load an adapter, in place of the one that has its name; needs the option `enable_lora`.

        Raises `EngineError` if it cannot be loaded.
        """
        errors: list[Exception | None] = []
        self._adapters.load(LoraRequest(name=name, path=str(path)), errors.append)
        while not errors:
            self._route(self.core.step())
        if errors[0] is not None:
            raise EngineError(str(errors[0]))

    def unload_lora(self, name: str) -> None:
        """Forget an adapter; runs that use it go on. Raises `EngineError` if there is none."""
        if not self._adapters.unload(name):
            raise EngineError(f"there is no adapter '{name}'")

    def list_loras(self) -> dict[str, str | None]:
        """The adapters that can be named, with the paths of those that have one."""
        return self._adapters.names() if self.info.lora.enabled else {}

    @property
    def _adapters(self) -> LoraManager:
        lora = self.core.addon(LoraManager) if isinstance(self.core, EngineCore) else None
        if lora is None:
            raise EngineError(LORA_DISABLED)
        return lora

    def embed(
        self, prompts: PoolingPrompt | Sequence[PoolingPrompt], params: PoolingParams | None = None
    ) -> npt.NDArray[np.float32]:
        """An embedding of each prompt, float32[N, dimensions]; pairs are given as tuples.

        Raises `InvalidParameter` before anything runs if a prompt or a parameter is bad.
        """
        pooled = self.pool(_pooling_batch(prompts), params)
        return np.stack([output.values for output in pooled])

    def score(
        self, query: str | Sequence[str], documents: str | Sequence[str], *, truncate: bool = True
    ) -> npt.NDArray[np.float32]:
        """How well each document answers the query, or each its own query: float32[N].

        By the model's classifier where it has one with one output (a cross-encoder), else the cosine of the
        embeddings. A pair that is too long is cut, unless `truncate` is False. Raises `InvalidParameter`.
        """
        scoring = Scoring.of(self.info.pooling, query, documents)
        cut = -1 if truncate else None
        return scoring.scores(self.pool(scoring.prompts, scoring.params, truncate_prompt_tokens=cut))

    def classify(self, prompts: PoolingPrompt | Sequence[PoolingPrompt]) -> npt.NDArray[np.float32]:
        """The classifier's probabilities, float32[N, labels]; `info.pooling.labels` names them."""
        pooled = self.pool(_pooling_batch(prompts), PoolingParams(task="classify"))
        return np.stack([output.values for output in pooled])

    def pool(
        self,
        prompts: Sequence[PoolingPrompt],
        params: PoolingParams | None = None,
        *,
        truncate_prompt_tokens: int | None = None,
    ) -> list[PooledOutput]:
        """A vector of each prompt, as `params` say. Raises `InvalidParameter`, `EngineError`."""
        prepared = [
            self._pooling_input.process(
                PoolingRequest(
                    prompt,
                    params or PoolingParams(),
                    request_id=f"request-{next(self._names)}",
                    truncate_prompt_tokens=truncate_prompt_tokens,
                )
            )
            for prompt in prompts
        ]
        states = {request.request_id: PooledState(request) for request in prepared}
        # They come in the order of the engine's steps.
        pooled = {output.request_id: output for output in self._follow(states)}
        return [cast(PooledOutput, pooled[name]) for name in states]

    def _requests_for(
        self,
        prompts: list[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None,
        lora: Lora | Sequence[Lora],
    ) -> list[GenerationRequest]:
        if sampling is None or isinstance(sampling, SamplingParams):
            sampling = [sampling or self.get_default_sampling_params()] * len(prompts)
        if len(sampling) != len(prompts):
            raise ValueError(f"{len(prompts)} prompts, but {len(sampling)} sampling parameters")
        if lora is None or isinstance(lora, str | LoraRequest):
            lora = [lora] * len(prompts)
        if len(lora) != len(prompts):
            raise ValueError(f"{len(prompts)} prompts, but {len(lora)} adapters")
        return [
            replace(
                request_for(prompt, params, f"request-{next(self._names)}"),
                lora=LoraRequest(name=adapter) if isinstance(adapter, str) else adapter,
            )
            for prompt, params, adapter in zip(prompts, sampling, lora, strict=True)
        ]

    def _run(self, requests: list[GenerationRequest]) -> Iterator[GenerationOutput]:
        """Outputs of `requests` as they come. Several runs may be under way: each gets its own outputs."""
        prepared = [self._input.process(request) for request in requests]
        states = {request.request_id: RequestState(request, self.tokenizer) for request in prepared}
        yield from cast(Iterator[GenerationOutput], self._follow(states))

    def _follow(
        self, states: Mapping[str, RequestState | PooledState]
    ) -> Iterator[GenerationOutput | PooledOutput]:
        """Start requests and give what comes of them."""
        mine = {name: _InFlight(state) for name, state in states.items()}
        self._in_flight |= mine
        try:
            self._route([output for state in states.values() for output in self.core.add(state.request)])
            while mine:
                for name, request in list(mine.items()):
                    while request.outputs:
                        output = request.outputs.popleft()
                        if isinstance(output, Exception):
                            raise output
                        if output.finished:
                            del mine[name]
                        yield output
                if mine and not any(request.outputs for request in mine.values()):
                    self._route(self.core.step())
        finally:
            for name in mine:
                self._in_flight.pop(name, None)
                self.core.abort(name)

    def _route(self, outputs: list[SequenceOutput]) -> None:
        for name, group in itertools.groupby(outputs, key=lambda output: output.request_id):
            request = self._in_flight[name]
            step = list(group)
            try:
                result = request.state.process(step)
            except (EngineError, InvalidParameter) as error:
                request.outputs.append(error)
                self.core.abort(name)
                continue
            if isinstance(request.state, RequestState):
                for index in stopped_by_text(step, request.state):
                    self.core.abort(name, index)
            if request.state.finished:
                del self._in_flight[name]
            if result is not None:
                request.outputs.append(result)


@dataclass(slots=True)
class _InFlight:
    state: RequestState | PooledState
    outputs: deque[GenerationOutput | PooledOutput | Exception] = field(default_factory=deque)


def _pooling_batch(prompts: PoolingPrompt | Sequence[PoolingPrompt]) -> list[PoolingPrompt]:
    """One prompt or several, as several; a tuple of two texts is one prompt, a pair."""
    if isinstance(prompts, str) or (isinstance(prompts, tuple) and len(prompts) == 2):
        return [cast(PoolingPrompt, prompts)]
    if prompts and isinstance(prompts[0], int):
        return [cast(list[int], list(prompts))]
    return cast(list[PoolingPrompt], list(prompts))


@contextmanager
def _progress_bar(num_prompts: int, *, shown: bool) -> Iterator[Callable[[int, bool], None]]:
    """A bar over the prompts, with output tokens per second; gives the function that moves it."""
    if not shown:
        yield lambda tokens, finished: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    started, total = time.perf_counter(), 0
    with Progress(*columns, TextColumn("{task.fields[rate]:.0f} tok/s"), transient=True) as bar:
        task = bar.add_task("generating", total=num_prompts, rate=0.0)

        def advance(tokens: int, finished: bool) -> None:
            nonlocal total
            total += tokens
            bar.update(task, advance=int(finished), rate=total / (time.perf_counter() - started))

        yield advance

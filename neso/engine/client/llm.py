"""`neso.LLM`: offline inference with an engine in the calling process."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from neso.engine.client.engine_client import EngineClient, Output, load_engine_tokenizer
from neso.engine.client.output_processor import PooledState, RequestState
from neso.engine.config import EngineConfig
from neso.engine.errors import EngineError
from neso.engine.ipc.engine_process import EngineService
from neso.engine.ipc.messages import Command
from neso.engine.load.loader import load_engine
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

Prompt = str | list[int] | Mapping[str, Any] | npt.NDArray[Any]
"""Text, token ids, embeddings float[P, hidden_size], or a mapping with fields of `GenerationRequest`."""

PoolingPrompt = str | list[int] | tuple[str, str]
"""Text, token ids that are used unchanged, or a pair of texts."""

Lora = str | LoraRequest | None
"""A LoRA adapter by name, or a `LoraRequest` with its source."""

_PROMPT_FIELDS = (
    *("prompt", "prompt_embeds", "prompt_embedding_table", "prompt_vocab_size", "images"),
    *("cache_salt", "priority", "queue_timeout_ms"),
)


class LLM:
    """An engine in this process. Options are those of `EngineConfig` and `SchedulerOptions`, by name.

    >>> llm = LLM("path/to/checkpoint")
    >>> results = llm.generate(["Hello", "Hi"], SamplingParams(temperature=0, max_tokens=16))

    `logits_processors` also takes callables: see `neso.engine.logits_processors.processor`.

    Raises `EngineError` if the model cannot be loaded, `ModelNotFound` if it does not exist. Not thread-safe.
    """

    def __init__(self, model: str | Path, **options: Any) -> None:
        directory = resolve_model(model)
        registered = dict(options.pop("logits_processors", {}))
        processors = {name: value for name, value in registered.items() if not isinstance(value, str)}
        if registered:
            options["logits_processors"] = {n: v for n, v in registered.items() if n not in processors}
        config = EngineConfig.from_options(str(directory), options)
        for name in ("data_parallel_size", "cpus", "device_ids"):
            if getattr(config, name) is not None:
                raise EngineError(
                    f"{name} is an option of the server; this engine runs in the calling process"
                )
        if config.cluster.enabled:
            raise EngineError("workers are an option of the server; this engine runs in the calling process")
        self.tokenizer = load_engine_tokenizer(config)
        self.core, self.info = load_engine(config, processors)
        images = open_image_prompt(config.model, self.info.vision, config.image_limits)
        self._client = EngineClient(self._send, self.info, self.tokenizer, images)
        self._service = EngineService(self.core, self._client.handle, self._client.handle)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        lora: Lora | Sequence[Lora] = None,
        progress: bool = True,
        drafts: Sequence[DraftTokens | None] | None = None,
    ) -> list[GenerationOutput]:
        """Generate completions for all prompts in one batch; returns the outputs in the order of the prompts.

        `sampling`: one for all prompts or one per prompt; None: see `get_default_sampling_params`. `lora`: likewise,
        names of adapters or `LoraRequest`. `drafts`: draft tokens for each prompt. Raises `InvalidParameter` before any
        prompt runs, except for invalid grammars and adapters, which are detected when they are compiled or loaded.
        """
        batch = _as_batch(prompts)
        requests = self._requests_for(batch, sampling, lora)
        if drafts is not None:
            requests = [replace(r, draft=draft) for r, draft in zip(requests, drafts, strict=True)]
        states = self._process(requests)
        messages: dict[str, list[GenerationOutput]] = {state.request.request_id: [] for state in states}
        with _progress_bar(len(batch), shown=progress) as advance:
            for output in cast(Iterator[GenerationOutput], self._run(states)):
                messages[output.request_id].append(output)
                advance(len(output.outputs), output.finished)
        return [
            GenerationOutput.joined(parts, prompt)
            for parts, prompt in zip(messages.values(), batch, strict=True)
        ]

    def stream(
        self, prompt: Prompt, sampling: SamplingParams | None = None, *, lora: Lora = None
    ) -> Iterator[GenerationOutput]:
        """Generate a completion for one prompt and yield the output of every step.

        Closing the iterator aborts the request.
        """
        states = self._process(self._requests_for([prompt], sampling, lora))
        yield from cast(Iterator[GenerationOutput], self._run(states))

    def chat(
        self,
        messages: list[dict[str, Any]],
        sampling: SamplingParams | None = None,
        *,
        lora: Lora = None,
        **template: Any,
    ) -> GenerationOutput:
        """Generate the next message of a conversation with the model's chat template.

        `template` are template variables. Images are content parts of type "image_url" (with a data: URL) or "image"
        (with an image as in a request).
        """
        messages, images = split_images(messages)
        prompt = self.tokenizer.apply_chat_template(messages, **template)
        ids = self.tokenizer.encode(prompt, add_special_tokens=False)
        (result,) = self.generate([{"prompt": ids, "images": images}], sampling, lora=lora, progress=False)
        return replace(result, prompt=ids)

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the default sampling parameters, from the checkpoint's generation_config.json."""
        return self.info.default_sampling.params()

    def load_lora(self, name: str, path: str | Path) -> None:
        """Load an adapter, replacing one of the same name. Requires the option `enable_lora`.

        Raises `EngineError` if it cannot be loaded.
        """
        self._change_lora(LoraRequest(name=name, path=str(path)))

    def unload_lora(self, name: str) -> None:
        """Unload an adapter; requests in flight finish with it. Raises `EngineError` if it does not exist."""
        self._change_lora(name)

    def list_loras(self) -> dict[str, str | None]:
        """Return the names of the loaded adapters, each with the path it was loaded from, if any."""
        return self._client.list_loras()

    def embed(
        self, prompts: PoolingPrompt | Sequence[PoolingPrompt], params: PoolingParams | None = None
    ) -> npt.NDArray[np.float32]:
        """Return the embeddings of the prompts, float32[N, dimensions]; pairs of texts are tuples.

        Raises `InvalidParameter` before any prompt runs.
        """
        pooled = self.pool(_as_pooling_batch(prompts), params)
        return np.stack([output.values for output in pooled])

    def score(
        self, query: str | Sequence[str], documents: str | Sequence[str], *, truncate: bool = True
    ) -> npt.NDArray[np.float32]:
        """Return the relevance of each document to the query, or to its own query: float32[N].

        Scores are computed by the model's classifier if it has one output (cross-encoder), otherwise as the cosine
        similarity of embeddings. Pairs that are too long are truncated, unless `truncate` is False. Raises
        `InvalidParameter`.
        """
        scoring = Scoring.of(self.info.pooling, query, documents)
        limit = -1 if truncate else None
        return scoring.scores(self.pool(scoring.prompts, scoring.params, truncate_prompt_tokens=limit))

    def classify(self, prompts: PoolingPrompt | Sequence[PoolingPrompt]) -> npt.NDArray[np.float32]:
        """Return class probabilities, float32[N, labels]; `info.pooling.labels` has the label names."""
        pooled = self.pool(_as_pooling_batch(prompts), PoolingParams(task="classify"))
        return np.stack([output.values for output in pooled])

    def pool(
        self,
        prompts: Sequence[PoolingPrompt],
        params: PoolingParams | None = None,
        *,
        truncate_prompt_tokens: int | None = None,
    ) -> list[PooledOutput]:
        """Return the pooled vectors of the prompts, in their order. Raises `InvalidParameter`, `EngineError`."""
        params = params or PoolingParams()
        states = self._process(
            PoolingRequest(prompt, params, truncate_prompt_tokens=truncate_prompt_tokens)
            for prompt in prompts
        )
        # Results arrive in the order of the engine's steps.
        pooled = {output.request_id: cast(PooledOutput, output) for output in self._run(states)}
        return [pooled[state.request.request_id] for state in states]

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
        adapters = [LoraRequest(name=adapter) if isinstance(adapter, str) else adapter for adapter in lora]
        return [
            _request_for(prompt, params, adapter)
            for prompt, params, adapter in zip(prompts, sampling, adapters, strict=True)
        ]

    def _process(
        self, requests: Iterable[GenerationRequest | PoolingRequest]
    ) -> list[RequestState | PooledState]:
        return [self._client.process(request) for request in requests]

    def _run(self, states: Sequence[RequestState | PooledState]) -> Iterator[Output]:
        """Submit requests and yield their outputs. Several of these iterators can be active at the same time."""
        outbox: deque[Output | Exception] = deque()
        num_unfinished = len(states)
        try:
            for state in states:
                self._client.submit(state, outbox.append)
            while num_unfinished:
                while outbox:
                    output = outbox.popleft()
                    if isinstance(output, Exception):
                        raise output
                    num_unfinished -= output.finished
                    yield output
                if num_unfinished and not outbox:
                    self._step()
        finally:
            for state in states:
                self._client.abort(state)

    def _step(self) -> None:
        self._client.dispatch(self._service.step())

    def _send(self, command: Command) -> None:
        if outputs := self._service.apply(command):
            self._client.dispatch(outputs)

    def _change_lora(self, change: LoraRequest | str) -> None:
        messages: list[str] = []
        self._client.change_lora(change, messages.append)
        while not messages:
            self._step()
        if messages[0]:
            raise EngineError(messages[0])


def _as_batch(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Return one or several prompts as a list."""
    if isinstance(prompts, (str, Mapping)) or (isinstance(prompts, np.ndarray) and prompts.ndim == 2):
        return [prompts]
    if len(prompts) and isinstance(prompts[0], (int, np.integer)):
        return [[int(cast(int, token)) for token in prompts]]
    return list(prompts)


def _as_pooling_batch(prompts: PoolingPrompt | Sequence[PoolingPrompt]) -> list[PoolingPrompt]:
    """Return one or several prompts as a list; a tuple of two texts is one prompt, a pair."""
    if isinstance(prompts, str) or (isinstance(prompts, tuple) and len(prompts) == 2):
        return [cast(PoolingPrompt, prompts)]
    if prompts and isinstance(prompts[0], int):
        return [cast(list[int], list(prompts))]
    return cast(list[PoolingPrompt], list(prompts))


def _request_for(prompt: Prompt, sampling: SamplingParams, lora: LoraRequest | None) -> GenerationRequest:
    """Create a request. Raises `InvalidParameter` for a mapping with an unknown field."""
    if isinstance(prompt, np.ndarray):
        return GenerationRequest([], sampling, lora=lora, prompt_embeds=prompt)
    if not isinstance(prompt, Mapping):
        return GenerationRequest(prompt, sampling, lora=lora)
    fields = dict(prompt)
    if "prompt_token_ids" in fields:  # vLLM's names
        fields["prompt"] = fields.pop("prompt_token_ids")
    if "multi_modal_data" in fields:
        image = fields.pop("multi_modal_data").get("image", ())
        fields["images"] = image if isinstance(image, (list, tuple)) else (image,)
    if "images" in fields:
        fields["images"] = tuple(fields["images"])
    for name in fields:
        if name not in _PROMPT_FIELDS:
            raise InvalidParameter(name, f"unknown in a prompt, known are {', '.join(_PROMPT_FIELDS)}")
    return GenerationRequest(fields.pop("prompt", []), sampling, lora=lora, **fields)


@contextmanager
def _progress_bar(num_prompts: int, *, shown: bool) -> Iterator[Callable[[int, bool], None]]:
    """Show a progress bar with the output rate; yields `advance(num_tokens, finished)`."""
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

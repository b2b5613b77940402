"""Pooling requests: embeddings, scores of text pairs, classification."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from neso.generation.errors import InvalidParameter
from neso.generation.language_model import TokenizerLike
from neso.generation.request import text_size

Float32Array = npt.NDArray[np.float32]
PoolingKind = Literal["mean", "last", "cls", "max"]
PoolingTask = Literal["embed", "classify"]


class PoolingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Pooling of the hidden states of a prompt into one vector. None selects the default of the model's files.

    - task: "embed" for an embedding, "classify" for the output of the model's classifier: one score, or one per class
    - pooling: mean or maximum over the tokens, the last token, or the first token ("cls")
    - dimensions: number of leading dimensions to keep, for Matryoshka models (arXiv 2205.13147)
    - normalize: scale to length 1, after truncation to `dimensions`
    - activation: apply sigmoid to a single score, softmax to several classes; False returns logits

    Raises `InvalidParameter` with the field's name.
    """

    task: PoolingTask = "embed"
    pooling: PoolingKind | None = None
    dimensions: int | None = None
    normalize: bool | None = None
    activation: bool = True

    def __post_init__(self) -> None:
        if self.dimensions is not None and self.dimensions < 1:
            raise InvalidParameter("dimensions", f"must be at least 1, got {self.dimensions}")


@dataclass(frozen=True, slots=True)
class PoolingRequest:
    """One text, token ids that are used unchanged, or a pair of texts.

    `truncate_prompt_tokens`: number of tokens to keep, including special tokens; -1: as many as the model allows;
    None: a longer prompt is rejected.
    """

    prompt: str | list[int] | tuple[str, str]
    params: PoolingParams = field(default_factory=PoolingParams)
    request_id: str = ""
    priority: int = 0
    add_special_tokens: bool = True
    truncate_prompt_tokens: int | None = None
    queue_delay: float = 0.0
    """See `GenerationRequest.queue_delay`."""

    @property
    def size(self) -> int:
        """Approximate memory of the prompt in bytes."""
        prompt = self.prompt
        if isinstance(prompt, tuple):
            return sum(map(text_size, prompt))
        return text_size(prompt) if isinstance(prompt, str) else 36 * len(prompt)


@dataclass(frozen=True, slots=True)
class PooledOutput:
    """Result of a pooling request. `values` float32[D]: the embedding, the score, or one value per class."""

    request_id: str
    values: Float32Array
    num_prompt_tokens: int
    finished: bool = True


class PoolingInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Pooling tasks of a model, width of its embeddings, default pooling and class names."""

    tasks: frozenset[PoolingTask]
    dimensions: int
    kind: PoolingKind
    labels: list[str] = []


class PoolingModel(Protocol):
    """A model that converts text to vectors. Implemented by engines."""

    @property
    def text(self) -> TokenizerLike: ...

    @property
    def max_model_len(self) -> int:
        """Maximum number of tokens of a prompt."""

    @property
    def pooling(self) -> PoolingInfo | None:
        """Supported pooling; None for a model that only generates text."""

    async def pool(self, request: PoolingRequest) -> PooledOutput:
        """Return the result of `request`. Raises `InvalidParameter` if it is not supported. Cancelling aborts it."""


MAX_TASKS_PER_TURN = 4
"""Maximum requests started per event-loop iteration: tokenizing them blocks the loop."""


async def pool_all(
    pool: Callable[[PoolingRequest], Awaitable[PooledOutput]], requests: Sequence[PoolingRequest]
) -> list[PooledOutput]:
    """Return the results of all requests, in order. If one fails, cancel the others and raise its error."""
    tasks: list[asyncio.Future[PooledOutput]] = []
    try:
        for start in range(0, len(requests), MAX_TASKS_PER_TURN):
            batch = requests[start : start + MAX_TASKS_PER_TURN]
            tasks += [asyncio.ensure_future(pool(request)) for request in batch]
            await asyncio.sleep(0)
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@dataclass(frozen=True, slots=True)
class Scoring:
    """The pooling requests that score N pairs of texts, and the scores from their results.

    A classifier with one output (cross-encoder) processes each pair as one prompt. Otherwise each distinct text is
    embedded once, and the score of a pair is the cosine similarity.
    """

    prompts: list[str | tuple[str, str]]
    params: PoolingParams
    pairs: list[tuple[int, int]]
    """Indices into `prompts` of each pair; both are the same for a cross-encoder."""

    @classmethod
    def of(
        cls,
        info: PoolingInfo | None,
        queries: str | Sequence[str],
        documents: str | Sequence[str],
        *,
        activation: bool = True,
    ) -> Scoring:
        """Pair one query with all documents, or one query with each document. Raises `InvalidParameter`."""
        documents = [documents] if isinstance(documents, str) else list(documents)
        queries = [queries] if isinstance(queries, str) else list(queries)
        if len(queries) not in (1, len(documents)):
            raise InvalidParameter(
                "documents", f"there are {len(queries)} queries and {len(documents)} documents: no pairs"
            )
        queries = queries * len(documents) if len(queries) == 1 else queries
        if info is not None and "classify" in info.tasks:
            if len(info.labels) != 1:
                raise InvalidParameter(
                    "model", f"its classifier has {len(info.labels)} outputs, a score needs one"
                )
            params = PoolingParams(task="classify", activation=activation)
            return cls(
                list(zip(queries, documents, strict=True)), params, [(i, i) for i in range(len(documents))]
            )
        indices: dict[str, int] = {}
        pairs = [
            (indices.setdefault(query, len(indices)), indices.setdefault(document, len(indices)))
            for query, document in zip(queries, documents, strict=True)
        ]
        return cls(list(indices), PoolingParams(normalize=True), pairs)

    def scores(self, pooled: Sequence[PooledOutput]) -> Float32Array:
        """Return float32[N] from the results of `prompts`."""
        if self.params.task == "classify":
            return np.array([output.values[0] for output in pooled], np.float32)
        return np.array([pooled[q].values @ pooled[d].values for q, d in self.pairs], np.float32)

"""What the engine core is asked to do, and what it gives back; the messages of the engine's channel hold these."""

from __future__ import annotations

import msgspec

from neso.engine.core.input_embeddings import InputEmbeddings, PromptImage
from neso.generation.output import FinishReason
from neso.generation.pooling import PoolingParams
from neso.generation.request import CacheRetention, LoraRequest
from neso.generation.sampling_params import SamplingParams


class RequestDraft(msgspec.Struct, frozen=True, array_like=True):
    """Tokens guessed by the client; `logits`: float32[len(token_ids), vocab_size] as bytes, see `DraftTokens`."""

    token_ids: list[int]
    logits: bytes | None = None
    acceptance_threshold: float | None = None


class EngineRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Token ids to continue. Checked already: the prompt fits, `max_tokens` is within the model's length.

    `end_token_ids` end a sequence (the model's own, unless ignore_eos, and the request's stop tokens). `bad_words`:
    those of `sampling` as tokens, in every way that they may be written.
    `cache_identity` keeps apart what must not share prefix-cache blocks (adapter version, salt).
    Lower `priority` goes first. `queue_timeout_ms`: how long it may wait for its first step. `lora` is the adapter that
    the client wants, `adapter` the version of it that the engine has found (see `LoraManager.resolve`), 0 for none.
    `input_embeddings`: rows that stand in the prompt in place of tokens; `images`: the same, as pixels that a vision
    tower makes rows of.
    `pooling`: the prompt is to become a vector, and nothing is generated; `token_type_ids` may be given with it.
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams
    max_tokens: int
    end_token_ids: frozenset[int] = frozenset()
    bad_words: tuple[tuple[int, ...], ...] = ()
    priority: int = 0
    cache_identity: tuple[str, ...] = ()
    lora: LoraRequest | None = None
    adapter: int = 0
    queue_timeout_ms: float | None = None
    input_embeddings: InputEmbeddings | None = None
    images: list[PromptImage] = []
    pooling: PoolingParams | None = None
    token_type_ids: list[int] = []
    draft: RequestDraft | None = None
    retention: CacheRetention | None = None


class PositionLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log probabilities at one position: of `token_id`, its rank (1 is the most likely), and of the top tokens."""

    token_id: int
    logprob: float
    rank: int
    top_ids: list[int]
    top_logprobs: list[float]


class SequenceOutput(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What one step gave one sequence.

    `error` says why, when the finish reason is ERROR; `error_field` names the parameter that is at fault, if one is;
    `refused` when the engine had no room or time for it, so that it may be tried again later.

    `scheduled_ns`: when the sequence was first scheduled, in ns of the monotonic clock; with its first token.
    `cumulative_logprob`: of a whole sequence that a beam search found. `context_logits`, `generation_logits`: rows of
    float32[vocabulary] for the next positions of the prompt, and for each of `token_ids`.
    `preemptions`: how often it had to start over; with its last token.
    `pooled`: the vector that was asked for, float32 as bytes.
    `draft_tokens` guessed tokens were computed, the first `accepted_draft_tokens` of `token_ids` are of them.
    """

    request_id: str
    index: int
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    end_token_id: int | None = None
    logprobs: list[PositionLogprobs] = []
    prompt_logprobs: list[PositionLogprobs] = []
    cached_tokens: int = 0
    scheduled_ns: int = 0
    cumulative_logprob: float | None = None
    context_logits: bytes = b""
    generation_logits: bytes = b""
    preemptions: int = 0
    pooled: bytes = b""
    draft_tokens: int = 0
    accepted_draft_tokens: int = 0
    error: str = ""
    refused: bool = False
    error_field: str = ""

    @classmethod
    def failed(
        cls, request_id: str, index: int, message: str, *, refused: bool = False, error_field: str = ""
    ) -> SequenceOutput:
        """What ends a sequence that cannot go on."""
        return cls(
            request_id=request_id,
            index=index,
            token_ids=[],
            finish_reason=FinishReason.ERROR,
            error=message,
            refused=refused,
            error_field=error_field,
        )

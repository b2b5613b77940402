"""Requests to the engine core and its outputs. Both are sent over the engine channel."""

from __future__ import annotations

import msgspec
import numpy as np
import numpy.typing as npt

from neso.generation.output import FinishReason
from neso.generation.pooling import PoolingParams
from neso.generation.request import CacheRetention, LoraRequest
from neso.generation.sampling_params import SamplingParams

PLACEHOLDER = 0
"""Token id of a prompt position whose embedding is supplied or computed from an image."""


class InputEmbeddings(msgspec.Struct, frozen=True, array_like=True):
    """Embeddings that replace prompt-token embeddings, as bytes.

    - positions: int32[E], ascending; the prompt has `PLACEHOLDER` there
    - rows: float32[E, hidden_size]
    """

    positions: bytes
    rows: bytes
    hidden_size: int

    @classmethod
    def of(cls, positions: npt.NDArray[np.int32], rows: npt.NDArray[np.float32]) -> InputEmbeddings:
        """Convert int32[E] and float32[E, hidden]."""
        return cls(positions.astype(np.int32).tobytes(), rows.astype(np.float32).tobytes(), rows.shape[1])


class PromptImage(msgspec.Struct, frozen=True, array_like=True):
    """An image in a prompt, as bytes. The vision tower computes its embeddings.

    - positions: int32[E], ascending; the prompt has `PLACEHOLDER` there
    - pixels: uint8[tiles, height, width, 3], of this `shape` without the last dimension
    """

    positions: bytes
    pixels: bytes
    shape: tuple[int, int, int]


class RequestDraft(msgspec.Struct, frozen=True, array_like=True):
    """Draft tokens supplied by the client, see `DraftTokens`.

    `logits`: float32[len(token_ids), vocab_size] as bytes.
    """

    token_ids: list[int]
    logits: bytes | None = None
    acceptance_threshold: float | None = None


class KvImported(msgspec.Struct, frozen=True, array_like=True):
    """How the blocks of a prompt have come from another engine.

    - started_ns, ended_ns: from the request's arrival to the end of the transfer, in ns of the monotonic clock
    - blocks, num_bytes: transferred; missing: blocks that were expected and did not come
    - transport: "shm", "nixl", "messages", or "" if the other engine was not reached
    """

    started_ns: int
    ended_ns: int
    blocks: int
    missing: int
    num_bytes: int
    transport: str


class KvExport(msgspec.Struct, frozen=True, array_like=True):
    """Compute the prompt for another engine: keep its full blocks, and generate nothing.

    - transfer_id: chosen by the client, not in use in the engine
    - lease_seconds: the blocks are freed this long after the prompt is computed, unless the lease is extended
    """

    transfer_id: str
    lease_seconds: float = 30.0


class KvImport(msgspec.Struct, frozen=True, array_like=True):
    """Take the prompt's blocks from another engine, which computes or has computed them as a `KvExport`.

    If that fails, the engine computes the prompt itself.

    - address: `EngineInfo.kv_address` of the other engine
    - timeout_seconds: limit of the time until all blocks have arrived
    """

    address: str
    transfer_id: str
    timeout_seconds: float = 30.0


class EngineRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A validated request: the prompt fits the context, and `max_tokens` is within the model length.

    - end_token_ids: the model's own (unless ignore_eos) and the request's stop tokens
    - bad_words: those of `sampling` as token sequences, in all spellings
    - priority: lower goes first; queue_timeout_ms: limit of the time until its first step
    - cache_identity: separates requests that must not share prefix-cache blocks (salt)
    - lora: the adapter to use
    - input_embeddings, images: content of placeholders in the prompt
    - pooling: compute an embedding of the prompt and generate nothing; `token_type_ids` are for encoders
    - queue_delay: seconds added to the arrival time in the waiting queue
    - draft: tokens expected by the client; retention: priorities of the prompt's blocks in the cache
    - output_token_ids: tokens that another engine has generated for the request, which continues after them as if this
      engine had generated them. Only new tokens are output; `max_tokens` counts both. For requests with one sequence
    - kv_export, kv_import: transfer of the blocks of the prompt and of `output_token_ids` between engines
    - trace: W3C trace context of the request, or the id of its trace; "" if it is not traced
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
    queue_timeout_ms: float | None = None
    input_embeddings: InputEmbeddings | None = None
    images: list[PromptImage] = []
    pooling: PoolingParams | None = None
    token_type_ids: list[int] = []
    draft: RequestDraft | None = None
    retention: CacheRetention | None = None
    queue_delay: float = 0.0
    output_token_ids: list[int] = []
    kv_export: KvExport | None = None
    kv_import: KvImport | None = None
    trace: str = ""

    def prefill_only(self, export: KvExport) -> EngineRequest:
        """Return the request that computes the prompt of this one and exports its blocks, with the same id."""
        return msgspec.structs.replace(
            self,
            sampling=_GREEDY,
            bad_words=(),
            draft=None,
            kv_export=export,
            kv_import=None,
        )


_GREEDY = SamplingParams(temperature=0.0)


class PositionLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log probability of `token_id` at one position, its rank (1 is the most likely), and the most likely tokens."""

    token_id: int
    logprob: float
    rank: int
    top_ids: list[int]
    top_logprobs: list[float]


class SequenceOutput(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Results of one step for one sequence.

    - scheduled_ns: time when it was first scheduled, in ns of the monotonic clock; sent with its first token
    - cached_tokens: prompt tokens found in the prefix cache
    - cumulative_logprob: of a whole sequence found by beam search
    - context_logits, generation_logits: float32[n, vocab_size] as bytes, for positions of the prompt, and for each of
      `token_ids`
    - preemptions: number of preemptions; sent with its last token
    - pooled: the embedding, float32 as bytes
    - draft_tokens: number of draft tokens computed; the first `accepted_draft_tokens` of `token_ids` are draft tokens
    - exported_tokens: number of first tokens whose blocks are kept for another engine. Set by the only output of a
      `KvExport`, which ends the request with the finish reason LENGTH
    - imported_tokens: number of tokens whose blocks came from another engine, not counted in `cached_tokens`;
      import_error: why the engine computed them itself; imported: how they came. Sent with the first token
    - error: reason, if the finish reason is ERROR; `error_field` names the invalid parameter; `refused`: the engine had
      no capacity or time, so the request may be retried
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
    exported_tokens: int = 0
    imported_tokens: int = 0
    import_error: str = ""
    imported: KvImported | None = None
    error: str = ""
    refused: bool = False
    error_field: str = ""

    def moved_in_time(self, ns: int) -> SequenceOutput:
        """Return the output with times that are `ns` later."""
        imported = self.imported
        if imported is not None:
            start, end = imported.started_ns + ns, imported.ended_ns + ns
            imported = msgspec.structs.replace(imported, started_ns=start, ended_ns=end)
        return msgspec.structs.replace(self, scheduled_ns=self.scheduled_ns + ns, imported=imported)

    @classmethod
    def failed(
        cls, request_id: str, index: int, message: str, *, refused: bool = False, error_field: str = ""
    ) -> SequenceOutput:
        """Return the output that ends a sequence with an error."""
        return cls(
            request_id=request_id,
            index=index,
            token_ids=[],
            finish_reason=FinishReason.ERROR,
            error=message,
            refused=refused,
            error_field=error_field,
        )

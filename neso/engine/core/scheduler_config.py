"""Options of the scheduler."""

from __future__ import annotations

from typing import Annotated, Literal, NamedTuple

import msgspec
from msgspec import Meta

BatchSchedulerPolicy = Literal["max_utilization", "guaranteed_no_evict"]
GptModelType = Literal["inflight_fused_batching", "inflight_batching", "V1", "static"]
STATIC_BATCHING: frozenset[GptModelType] = frozenset({"V1", "static"})


WHOLE_PROMPT = 1 << 30
"""A `max_prefill_chunk` that is always above the token budget of a step."""


class StepLimits(NamedTuple):
    """Default limits of a step."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_prefill_chunk: int = WHOLE_PROMPT


CPU_LIMITS = StepLimits(64, 1024, 512)


def gpu_limits(name: str, memory: int) -> StepLimits:
    """Return vLLM's defaults for a GPU with this name and memory in bytes."""
    if memory >= 160 << 30:
        return StepLimits(1024, 16384)
    # vLLM measured that more tokens in a step make an A100 slower.
    if memory >= 70 << 30 and "a100" not in name.lower():
        return StepLimits(1024, 8192)
    return StepLimits(256, 2048)


class SchedulerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Step limits and the scheduling policy, as given. The descriptions are the help texts of the options.

    The defaults of the limits depend on the device.
    """

    max_num_seqs: Annotated[int | None, Meta(description="Maximum number of sequences in a step.")] = None
    max_num_batched_tokens: Annotated[int | None, Meta(description="Token budget of a step.")] = None
    max_prefill_chunk: Annotated[
        int | None, Meta(description="Maximum number of prompt tokens of one sequence in a step.")
    ] = None
    block_size: Annotated[int, Meta(description="Number of tokens of a KV-cache block.")] = 16
    enable_prefix_caching: Annotated[
        bool, Meta(description="Reuse the KV cache of common prefixes of prompts.")
    ] = True
    max_decode_stretch: Annotated[
        float,
        Meta(description="Maximum factor by which prefills lengthen a step that decodes; 0 for no limit."),
    ] = 2.0
    enable_overlap: Annotated[
        bool, Meta(description="Schedule the next step while one runs, if the runner supports it.")
    ] = True
    batch_scheduler_policy: Annotated[
        BatchSchedulerPolicy, Meta(description="When waiting requests are admitted.")
    ] = "max_utilization"
    gpt_model_type: Annotated[GptModelType, Meta(description="In-flight or static batching.")] = (
        "inflight_fused_batching"
    )
    priority_ageing_seconds: Annotated[
        float, Meta(description="Waiting time that outweighs one level of priority; 0 disables it.")
    ] = 10.0
    max_queue_size: Annotated[
        int | None, Meta(description="Maximum number of waiting requests; further ones are rejected.")
    ] = None

    @property
    def in_flight_batching(self) -> bool:
        """Whether requests can start while others run."""
        return self.gpt_model_type not in STATIC_BATCHING

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_prefill_chunk", "block_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if self.max_queue_size is not None and self.max_queue_size < 1:
            raise ValueError(f"max_queue_size must be at least 1, got {self.max_queue_size}")
        if self.priority_ageing_seconds < 0:
            raise ValueError(
                f"priority_ageing_seconds must be at least 0, got {self.priority_ageing_seconds}"
            )
        if self.max_decode_stretch and self.max_decode_stretch <= 1:
            raise ValueError(f"max_decode_stretch must be above 1, or 0, got {self.max_decode_stretch}")
        sequences, tokens = self.max_num_seqs, self.max_num_batched_tokens
        if sequences is not None and tokens is not None and tokens < sequences:
            raise ValueError(
                f"max_num_batched_tokens ({tokens}) must be at least max_num_seqs ({sequences}): "
                "every running sequence gets a token in every step"
            )

    def resolve(self, defaults: StepLimits) -> SchedulerConfig:
        """Replace options that are not given by the defaults of the device; these give way to the given ones."""
        sequences, tokens = self.max_num_seqs, self.max_num_batched_tokens
        if tokens is None:
            tokens = max(defaults.max_num_batched_tokens, sequences or 0)
        if sequences is None:
            sequences = min(defaults.max_num_seqs, tokens)
        chunk = min(self.max_prefill_chunk or defaults.max_prefill_chunk, tokens)
        limits = {"max_num_seqs": sequences, "max_num_batched_tokens": tokens, "max_prefill_chunk": chunk}
        return SchedulerConfig(**{**msgspec.structs.asdict(self), **limits})


class SchedulerConfig(SchedulerOptions, frozen=True, kw_only=True):
    """Step limits and the scheduling policy of an engine, see `SchedulerOptions.resolve`."""

    max_num_seqs: int = CPU_LIMITS.max_num_seqs
    max_num_batched_tokens: int = CPU_LIMITS.max_num_batched_tokens
    max_prefill_chunk: int = CPU_LIMITS.max_prefill_chunk

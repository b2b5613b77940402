"""Options of the scheduler."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from neso.engine.core.admission import STATIC_BATCHING, BatchSchedulerPolicy, GptModelType


class SchedulerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Step limits and the scheduling policy. The descriptions are the help texts of the options."""

    max_num_seqs: Annotated[int, Meta(description="Maximum number of sequences in a step.")] = 64
    max_num_batched_tokens: Annotated[int, Meta(description="Token budget of a step.")] = 1024
    max_prefill_chunk: Annotated[
        int, Meta(description="Maximum number of prompt tokens of one sequence in a step.")
    ] = 512
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
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.max_queue_size is not None and self.max_queue_size < 1:
            raise ValueError(f"max_queue_size must be at least 1, got {self.max_queue_size}")
        if self.priority_ageing_seconds < 0:
            raise ValueError(
                f"priority_ageing_seconds must be at least 0, got {self.priority_ageing_seconds}"
            )
        if self.max_decode_stretch and self.max_decode_stretch <= 1:
            raise ValueError(f"max_decode_stretch must be above 1, or 0, got {self.max_decode_stretch}")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least max_num_seqs "
                f"({self.max_num_seqs}): every running sequence gets a token in every step"
            )

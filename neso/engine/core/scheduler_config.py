"""Options of the scheduler."""

from __future__ import annotations

import msgspec

from neso.engine.core.admission import STATIC_BATCHING, BatchSchedulerPolicy, GptModelType


class SchedulerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Options of the scheduler.

    - max_num_seqs: running sequences; max_num_batched_tokens: token budget of a step
    - max_prefill_chunk: tokens of one sequence in a step, so that a long prompt does not starve others
    - max_decode_stretch: limit of the duration of a step that decodes, relative to decoding alone (see
      `PrefillPacer`); 0 for no limit, which minimizes the time to the first token and makes the others uneven
    - enable_overlap: schedule the next step while one runs, if the runner can
    - batch_scheduler_policy, gpt_model_type: when waiting requests start, see `admission`
    - priority_ageing_seconds: waiting time that a priority level is worth, see `WaitingQueue`
    - max_queue_size: requests that may wait; more are refused
    """

    max_num_seqs: int = 64
    max_num_batched_tokens: int = 1024
    max_prefill_chunk: int = 512
    block_size: int = 16
    enable_prefix_caching: bool = True
    max_decode_stretch: float = 2.0
    enable_overlap: bool = True
    batch_scheduler_policy: BatchSchedulerPolicy = "max_utilization"
    gpt_model_type: GptModelType = "inflight_fused_batching"
    priority_ageing_seconds: float = 10.0
    max_queue_size: int | None = None

    @property
    def in_flight_batching(self) -> bool:
        """Whether requests start while others run."""
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

"""Engine options that limit the log probabilities and logits of a request."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

MAX_LOGPROBS = 20


class ScoreLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of the log probabilities and logits that requests can get, named as in vLLM and TensorRT-LLM.

    The logits of one position take 0.5 MB with a vocabulary of 128,256. `max_logprobs` -1 allows the whole vocabulary
    for `logprobs`, and 20 for `prompt_logprobs`. The descriptions are the help texts of the options.
    """

    max_logprobs: Annotated[
        int, Meta(description="Maximum of logprobs and prompt_logprobs of a request; -1 for no limit.")
    ] = MAX_LOGPROBS
    gather_context_logits: Annotated[
        bool | None, Meta(description="Allow logits of prompts; by default up to 64 MiB a request.")
    ] = None
    gather_generation_logits: Annotated[
        bool | None, Meta(description="Allow logits of output; by default up to 64 MiB a request.")
    ] = None

    def __post_init__(self) -> None:
        if self.max_logprobs < -1:
            raise ValueError(f"max_logprobs must be at least 0, or -1 for all, got {self.max_logprobs}")

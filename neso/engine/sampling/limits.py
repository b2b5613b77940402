"""Limits of the sampling parameters of one request."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta

from neso.generation import InvalidParameter, SamplingParams
from neso.generation.sampling_params import ALL_LOGPROBS, MAX_BIAS


def check_sampling(
    params: SamplingParams, bad_words: Iterable[tuple[int, ...]], *, max_num_seqs: int, vocab_size: int
) -> None:
    """Raises `InvalidParameter` for too many sequences or tokens outside the vocabulary."""
    for field in ("n", "best_of", "beam_width"):
        number = getattr(params, field)
        if number is not None and number > max_num_seqs:
            raise InvalidParameter(field, f"is {number}, this engine runs at most {max_num_seqs} sequences")
    check_tokens("logit_bias", params.logit_bias, vocab_size)
    check_tokens("stop_token_ids", params.stop_token_ids, vocab_size)
    check_tokens("stop_words", chain.from_iterable(params.stop_words), vocab_size)
    check_tokens("bad_words", chain.from_iterable(bad_words), vocab_size)
    check_tokens("allowed_token_ids", params.allowed_token_ids or (), vocab_size)
    if params.embedding_bias:
        _check_dense_bias(params.embedding_bias, vocab_size)


def _check_dense_bias(values: bytes, vocab_size: int) -> None:
    if len(values) != 4 * vocab_size:
        raise InvalidParameter(
            "embedding_bias", f"has {len(values) // 4} values, the vocabulary has {vocab_size} tokens"
        )
    bias = np.frombuffer(values, np.float32)
    # Written so that NaN fails the check.
    if not (np.abs(bias) <= MAX_BIAS).all():
        raise InvalidParameter("embedding_bias", f"has values that are NaN or beyond {MAX_BIAS:g}")


def check_tokens(field: str, token_ids: Iterable[int], vocab_size: int) -> None:
    """Raises `InvalidParameter` for a token outside the vocabulary."""
    for token in token_ids:
        if not 0 <= token < vocab_size:
            raise InvalidParameter(field, f"token {token} is not in the vocabulary of {vocab_size}")


MAX_LOGPROBS = 20
MAX_LOGITS_BYTES = 64 << 20
"""Limit of the bytes of logits of one request, unless the engine options allow or forbid logits."""


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
        if self.max_logprobs < ALL_LOGPROBS:
            raise ValueError(f"max_logprobs must be at least 0, or -1 for all, got {self.max_logprobs}")

    def check(
        self, params: SamplingParams, *, num_prompt_tokens: int, max_tokens: int, vocab_size: int
    ) -> None:
        """Raises `InvalidParameter` if a request with these lengths (in tokens) exceeds a limit."""
        if self.max_logprobs == ALL_LOGPROBS:
            _check_logprobs("logprobs", params.logprobs, ALL_LOGPROBS, vocab_size)
            _check_logprobs("prompt_logprobs", params.prompt_logprobs, 0, MAX_LOGPROBS)
        else:
            _check_logprobs("logprobs", params.logprobs, 0, self.max_logprobs)
            _check_logprobs("prompt_logprobs", params.prompt_logprobs, 0, self.max_logprobs)
        if params.return_context_logits:
            _check_logits(
                "return_context_logits",
                "gather_context_logits",
                self.gather_context_logits,
                num_prompt_tokens,
                vocab_size,
            )
        if params.return_generation_logits:
            _check_logits(
                "return_generation_logits",
                "gather_generation_logits",
                self.gather_generation_logits,
                params.num_sequences * max_tokens,
                vocab_size,
            )


def _check_logprobs(field: str, wanted: int | None, least: int, most: int) -> None:
    if wanted is not None and not least <= wanted <= most:
        raise InvalidParameter(
            field, f"must be at least {least} and at most {most}, got {wanted} (see the option max_logprobs)"
        )


def _check_logits(field: str, option: str, allowed: bool | None, num_rows: int, vocab_size: int) -> None:
    if allowed is False:
        raise InvalidParameter(field, f"this engine gives no such logits (see the option {option})")
    size = num_rows * vocab_size * 4
    if allowed is None and size > MAX_LOGITS_BYTES:
        raise InvalidParameter(
            field,
            f"{num_rows} rows of {vocab_size} logits are {size >> 20} MiB, a request gets at most "
            f"{MAX_LOGITS_BYTES >> 20} MiB of them unless the option {option} is set",
        )

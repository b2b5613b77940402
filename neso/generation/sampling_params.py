"""How tokens are chosen from logits, and when a sequence ends."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache
from typing import Any, Literal

import msgspec

from neso.generation.guided_decoding import NAMES as GUIDED_NAMES
from neso.generation.guided_decoding import GuidedDecoding, read_guided_decoding
from neso.generation.invalid_parameter import InvalidParameter
from neso.generation.parameter_values import ALIASES, as_msgspec_takes_it
from neso.generation.unicode_text import check_unicode

ALL_LOGPROBS = -1
"""Of `logprobs`: the log probabilities of the whole vocabulary."""
MAX_N = 128
MAX_STOP, MAX_WORDS = 64, 1024
"""The most of `stop`, and of `stop_words` and of `bad_words`: all of a sequence's text is held against them."""
MAX_WORD_LENGTH = 256
"""Characters or tokens of each."""
MAX_INT = 2**31 - 1
"""Of counts and token ids: runners keep them in 32 bits."""
MAX_BIAS = 1e30
"""Of a logit: two of them, divided by the lowest temperature, are still finite as float32."""
MAX_ENDS = 1024
"""Of stop_token_ids."""
MAX_BEAM_CANDIDATES = 8192
"""Of a beam search: beam_width times what may end a beam, and one more. So many are sorted in each step."""
_GREEDY_BELOW = 1e-5
"""Below it sampling is greedy, as in vLLM: the differences of logits would overflow."""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Sampling parameters of one request, by the names of vLLM and OpenAI. Validated when made.

    temperature 0 (below 1e-5) is greedy. `top_k` 0 or -1 and `top_p` 1 switch the filter off. `max_tokens` None
    generates to the model's length limit. `logprobs` k returns the k most likely tokens beside the sampled one, from
    the model's own distribution (before penalties and temperature); -1 returns all. How many there may be, and whether
    there are logits, says the engine (`ScoreLimits`). Raises `InvalidParameter` with the field's name.

    - best_of: sequences to sample, of which the n with the highest mean log probability are returned.
    - beam_width: above 1, beam search: the n best sequences by the sum of their log probabilities, divided by
      (length ** length_penalty). early_stopping True ends with the first beam_width finished ones, False when the
      live ones of now, "never" when the live ones at their longest can do no better, as in transformers.
      beam_search_diversity_rate times its rank is added to a beam's candidates when beams are chosen.
    - top_p_decay, top_p_min, top_p_reset_ids: top_p is multiplied by the first with every token, down to the second,
      and is itself again after the third was drawn (factual nucleus sampling, arXiv:2206.04624).
    - no_repeat_ngram_size: no sequence of so many tokens comes twice, the prompt included; 0 allows all.
    - bad_words: texts or token sequences that must not be generated; stop_words: token sequences that end it.
    - allowed_token_ids: nothing else is generated.
    - embedding_bias: float32[vocabulary] in the machine's order of bytes, added to the logits.
    - shown_special_tokens: texts of those that are shown although special tokens are skipped.
    - return_context_logits, return_generation_logits: the model's own logits of the prompt's positions, and those
      that each token was chosen from.
    """

    n: int = 1
    best_of: int | None = None
    beam_width: int = 1
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    beam_search_diversity_rate: float = 0.0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    top_p_decay: float = 1.0
    top_p_min: float = 1e-6
    top_p_reset_ids: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    stop_words: tuple[tuple[int, ...], ...] = ()
    ignore_eos: bool = False
    bad_words: tuple[str | tuple[int, ...], ...] = ()
    no_repeat_ngram_size: int = 0
    allowed_token_ids: tuple[int, ...] | None = None
    logit_bias: dict[int, float] = {}
    embedding_bias: bytes = b""
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    return_context_logits: bool = False
    return_generation_logits: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    shown_special_tokens: tuple[str, ...] = ()
    guided_decoding: GuidedDecoding | None = None

    def __post_init__(self) -> None:
        _in_range("n", self.n, 1, MAX_N)
        self._check_several()
        _in_range("temperature", self.temperature, 0.0, 100.0)
        _in_range("top_k", self.top_k, -1, MAX_INT)
        _in_range("top_p", self.top_p, 0.0, 1.0, exclusive_low=True)
        _in_range("min_p", self.min_p, 0.0, 1.0)
        _in_range("top_p_decay", self.top_p_decay, 0.0, 1.0, exclusive_low=True)
        _in_range("top_p_min", self.top_p_min, 0.0, 1.0, exclusive_low=True)
        if self.top_p_reset_ids is not None:
            _in_range("top_p_reset_ids", self.top_p_reset_ids, -1, MAX_INT)
        _in_range("no_repeat_ngram_size", self.no_repeat_ngram_size, 0, MAX_INT)
        _in_range("repetition_penalty", self.repetition_penalty, 1e-6, 1e6)
        _in_range("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _in_range("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        if self.seed is not None:
            _in_range("seed", self.seed, -(2**63), 2**64 - 1)
        if self.max_tokens is not None:
            _in_range("max_tokens", self.max_tokens, 1, MAX_INT)
        _in_range("min_tokens", self.min_tokens, 0, MAX_INT)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidParameter(
                "min_tokens", f"{self.min_tokens} is more than max_tokens {self.max_tokens}"
            )
        _check_words("stop", self.stop, MAX_STOP)
        _check_words("bad_words", self.bad_words, MAX_WORDS)
        _check_words("stop_words", self.stop_words, MAX_WORDS)
        self._check_ends()
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise InvalidParameter("allowed_token_ids", "must not be empty")
        if self.logprobs is not None:
            _in_range("logprobs", self.logprobs, ALL_LOGPROBS, MAX_INT)
        if self.prompt_logprobs is not None:
            _in_range("prompt_logprobs", self.prompt_logprobs, 0, MAX_INT)
        for token, bias in self.logit_bias.items():
            # Also what is not a number is not within.
            if token < 0 or not abs(bias) <= MAX_BIAS:
                raise InvalidParameter(
                    "logit_bias", f"token {token} with bias {bias}: a bias is at most {MAX_BIAS:g} either way"
                )

    def _check_ends(self) -> None:
        """Check how many tokens may end a sequence."""
        if len(self.stop_token_ids) > MAX_ENDS:
            raise InvalidParameter(
                "stop_token_ids", f"has {len(self.stop_token_ids)} entries, at most {MAX_ENDS} are taken"
            )
        for name in ("stop_token_ids", "stop_words"):
            number = len(getattr(self, name))
            if self.uses_beams and self.beam_width * (1 + number) > MAX_BEAM_CANDIDATES:
                raise InvalidParameter(name, f"{number} entries are too many for {self.beam_width} beams")

    def _check_several(self) -> None:
        """Check what says how many sequences there are."""
        _in_range("beam_width", self.beam_width, 1, MAX_N)
        _in_range("length_penalty", self.length_penalty, -10.0, 10.0)
        _in_range("beam_search_diversity_rate", self.beam_search_diversity_rate, -MAX_BIAS, MAX_BIAS)
        if not (isinstance(self.early_stopping, bool) or self.early_stopping == "never"):
            raise InvalidParameter(
                "early_stopping", f"must be a bool or 'never', got {self.early_stopping!r}"
            )
        if self.best_of is not None:
            _in_range("best_of", self.best_of, self.n, MAX_N)
        if self.beam_width > 1 and self.best_of is not None:
            raise InvalidParameter("best_of", "is for sampling, a beam search returns the best n in any case")
        if self.uses_beams and self.guided_decoding is not None:
            raise InvalidParameter("beam_width", "beams cannot be guided by a grammar")
        if 1 < self.beam_width < self.n:
            raise InvalidParameter("n", f"{self.n} is more than beam_width {self.beam_width}")

    @property
    def num_sequences(self) -> int:
        """Sequences that run at once, of which `n` are returned."""
        return max(self.n, self.best_of or 1, self.beam_width)

    @property
    def num_logprobs(self) -> int | None:
        """`logprobs`; at least those of the tokens themselves where sequences are compared by them."""
        return 0 if self.logprobs is None and (self.best_of or 0) > self.n else self.logprobs

    @property
    def wants_scores(self) -> bool:
        """Whether anything is asked for of the logits beside a token."""
        return self.num_logprobs is not None or self.return_generation_logits

    @property
    def wants_prompt_scores(self) -> bool:
        """Whether the logits of all positions of the prompt are needed."""
        return self.prompt_logprobs is not None or self.return_context_logits

    @property
    def uses_beams(self) -> bool:
        return self.beam_width > 1

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature < _GREEDY_BELOW

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> SamplingParams:
        """Make from loosely typed values (JSON, request parameters); strings are converted where unambiguous.

        `stop` may be one string; guided decoding has many names (`read_guided_decoding`), and TensorRT-LLM's names are
        known too. Raises `InvalidParameter` for an unknown name, a wrong type or a bad value.
        """
        known = _fields_by_name(cls)
        converted: dict[str, Any] = {}
        if GUIDED_NAMES & values.keys():
            converted["guided_decoding"] = read_guided_decoding(values)
            values = {name: value for name, value in values.items() if name not in GUIDED_NAMES}
        for given, value in values.items():
            name = ALIASES.get(given, given)
            if name not in known:
                raise InvalidParameter(given, "unknown sampling parameter")
            if value is None and (name in _MAY_BE_NULL or known[name].default is None):
                continue
            try:
                converted[name] = msgspec.convert(
                    as_msgspec_takes_it(name, value), known[name].type, strict=False
                )
            except (msgspec.ValidationError, ValueError, TypeError) as error:
                raise InvalidParameter(given, str(error)) from None
        return cls(**converted)


@cache
def _fields_by_name(struct: type[msgspec.Struct]) -> dict[str, msgspec.structs.FieldInfo]:
    """Kept: reading the annotations takes a millisecond, which each request would wait for."""
    return {field.name: field for field in msgspec.structs.fields(struct)}


_MAY_BE_NULL = frozenset(
    {"stop", "stop_token_ids", "stop_words", "bad_words", "logit_bias", "embedding_bias"}
)


def _check_words(field: str, words: tuple[str | tuple[int, ...], ...], most: int) -> None:
    if not all(words):
        raise InvalidParameter(field, "a word must not be empty")
    if len(words) > most:
        raise InvalidParameter(field, f"must be at most {most}, got {len(words)}")
    longest = max(map(len, words), default=0)
    if longest > MAX_WORD_LENGTH:
        raise InvalidParameter(field, f"each must be at most {MAX_WORD_LENGTH} long, got one of {longest}")
    for word in words:
        if isinstance(word, str):
            check_unicode(field, word)


def _in_range(
    field: str, value: float, low: float | None, high: float | None, *, exclusive_low: bool = False
) -> None:
    if isinstance(value, float) and not math.isfinite(value):
        raise InvalidParameter(field, f"{value} is not a finite number")
    too_low = low is not None and (value <= low if exclusive_low else value < low)
    too_high = high is not None and value > high
    if too_low or too_high:
        low_text = f"more than {low}" if exclusive_low else f"at least {low}"
        expected = low_text if high is None else f"{low_text} and at most {high}"
        raise InvalidParameter(field, f"must be {expected}, got {value}")

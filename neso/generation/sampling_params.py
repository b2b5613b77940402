"""Sampling parameters of a request, and their defaults from a checkpoint's `generation_config.json`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache
from typing import Any, Literal

import msgspec
import numpy as np

from neso.generation.errors import InvalidParameter, check_unicode
from neso.generation.guided_decoding import NAMES as GUIDED_NAMES
from neso.generation.guided_decoding import GuidedDecoding, read_guided_decoding

ALL_LOGPROBS = -1
"""Value of `logprobs` for the log probabilities of the whole vocabulary."""
MAX_N = 128
MAX_STOP, MAX_WORDS = 64, 1024
"""Maximum lengths of `stop`, and of `stop_words` and `bad_words`: every entry is matched against each new token."""
MAX_WORD_LENGTH = 256
"""Maximum length of a stop string or word, in characters or tokens."""
MAX_INT = 2**31 - 1
"""Maximum of counts and token ids: runners store them in 32 bits."""
MAX_BIAS = 1e30
"""Maximum logit bias: the sum of two biases, divided by the lowest temperature, is finite in float32."""
MAX_PENALTY = 1e6
"""Maximum penalty. The OpenAI API and vLLM allow less, TensorRT-LLM any number."""
MAX_STOP_TOKEN_IDS = 1024
MAX_BEAM_CANDIDATES = 8192
"""Maximum number of candidates sorted per beam-search step: beam_width × (1 + tokens that end a beam)."""
_GREEDY_BELOW = 1e-5
"""Temperature below which sampling is greedy, as in vLLM: scaled logits would overflow."""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Sampling parameters of one request, with the names of vLLM and OpenAI. Validated on construction.

    temperature 0 (below 1e-5) is greedy. `top_k` 0 or -1 and `top_p` 1 disable the filter. `max_tokens` None generates
    up to the model's length limit. `logprobs` k returns the sampled token and the k most likely tokens, from the
    model's distribution before penalties and temperature; -1 returns all. The engine limits log probabilities and
    logits (`ScoreLimits`). Raises `InvalidParameter` with the field's name.

    - best_of: number of sequences to sample; the n sequences with the highest mean log probability are returned.
    - beam_width: beam search if above 1: returns the n best sequences by the sum of their log probabilities divided by
      (length ** length_penalty). early_stopping True stops at beam_width finished sequences, False when the live beams
      cannot improve at their current length, "never" when they cannot improve at their maximum length, as in
      transformers. beam_search_diversity_rate × rank is added to the candidates of a beam in the selection.
    - top_p_decay, top_p_min, top_p_reset_ids: every token multiplies top_p by top_p_decay, down to top_p_min; sampling
      top_p_reset_ids resets it (factual nucleus sampling, arXiv:2206.04624).
    - no_repeat_ngram_size: no n-gram of this size occurs twice, including the prompt; 0 disables.
    - bad_words: texts or token sequences to exclude from the output; stop_words: token sequences that end the output.
    - allowed_token_ids: only these tokens are generated.
    - normalize_logprobs: log probabilities are those of the distribution that tokens are drawn from, after penalties,
      temperature and filters. No effect on beam search.
    - embedding_bias: float32[vocab_size] in native byte order, added to the logits.
    - logits_processor: name of a logits processor that is registered with the model.
    - shown_special_tokens: texts of special tokens that are output despite skip_special_tokens.
    - return_context_logits, return_generation_logits: return the raw logits of all prompt positions, and the logits
      that each token was sampled from.
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
    normalize_logprobs: bool = False
    prompt_logprobs: int | None = None
    return_context_logits: bool = False
    return_generation_logits: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    shown_special_tokens: tuple[str, ...] = ()
    guided_decoding: GuidedDecoding | None = None
    logits_processor: str | None = None

    def __post_init__(self) -> None:
        _in_range("n", self.n, 1, MAX_N)
        self._check_num_sequences()
        _in_range("temperature", self.temperature, 0.0, 100.0)
        _in_range("top_k", self.top_k, -1, MAX_INT)
        _in_range("top_p", self.top_p, 0.0, 1.0, exclusive_low=True)
        _in_range("min_p", self.min_p, 0.0, 1.0)
        _in_range("top_p_decay", self.top_p_decay, 0.0, 1.0, exclusive_low=True)
        _in_range("top_p_min", self.top_p_min, 0.0, 1.0, exclusive_low=True)
        if self.top_p_reset_ids is not None:
            _in_range("top_p_reset_ids", self.top_p_reset_ids, -1, MAX_INT)
        _in_range("no_repeat_ngram_size", self.no_repeat_ngram_size, 0, MAX_INT)
        _in_range("repetition_penalty", self.repetition_penalty, 1 / MAX_PENALTY, MAX_PENALTY)
        _in_range("presence_penalty", self.presence_penalty, -MAX_PENALTY, MAX_PENALTY)
        _in_range("frequency_penalty", self.frequency_penalty, -MAX_PENALTY, MAX_PENALTY)
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
        self._check_stop_tokens()
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise InvalidParameter("allowed_token_ids", "must not be empty")
        if self.logprobs is not None:
            _in_range("logprobs", self.logprobs, ALL_LOGPROBS, MAX_INT)
        if self.prompt_logprobs is not None:
            _in_range("prompt_logprobs", self.prompt_logprobs, 0, MAX_INT)
        for token, bias in self.logit_bias.items():
            # NaN fails the comparison.
            if token < 0 or not abs(bias) <= MAX_BIAS:
                raise InvalidParameter(
                    "logit_bias", f"token {token} with bias {bias}: a bias is at most {MAX_BIAS:g} either way"
                )

    def _check_stop_tokens(self) -> None:
        """Check the number of tokens that end a sequence."""
        if len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS:
            raise InvalidParameter(
                "stop_token_ids",
                f"has {len(self.stop_token_ids)} entries, at most {MAX_STOP_TOKEN_IDS} are allowed",
            )
        for name in ("stop_token_ids", "stop_words"):
            number = len(getattr(self, name))
            if self.uses_beams and self.beam_width * (1 + number) > MAX_BEAM_CANDIDATES:
                raise InvalidParameter(name, f"{number} entries are too many for {self.beam_width} beams")

    def _check_num_sequences(self) -> None:
        """Check the parameters of beam search and best_of."""
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
        if self.uses_beams and self.logits_processor is not None:
            raise InvalidParameter("logits_processor", "cannot be applied to a beam search")
        if 1 < self.beam_width < self.n:
            raise InvalidParameter("n", f"{self.n} is more than beam_width {self.beam_width}")

    @property
    def num_sequences(self) -> int:
        """Number of concurrent sequences, of which `n` are returned."""
        return max(self.n, self.best_of or 1, self.beam_width)

    @property
    def num_outputs(self) -> int:
        """Number of sequences that an engine outputs: the best `n` beams, or all others, of which `n` are returned."""
        return self.n if self.beam_width > 1 else self.num_sequences

    @property
    def num_logprobs(self) -> int | None:
        """`logprobs`; 0 (only the sampled tokens) if best_of needs them for its ranking."""
        return 0 if self.logprobs is None and (self.best_of or 0) > self.n else self.logprobs

    @property
    def needs_token_scores(self) -> bool:
        """Whether log probabilities or logits of generated tokens are needed."""
        return self.num_logprobs is not None or self.return_generation_logits

    @property
    def needs_prompt_scores(self) -> bool:
        """Whether the logits of all prompt positions are needed."""
        return self.prompt_logprobs is not None or self.return_context_logits

    @property
    def uses_beams(self) -> bool:
        return self.beam_width > 1

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always sampled."""
        return self.temperature < _GREEDY_BELOW

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> SamplingParams:
        """Convert loosely typed values (JSON, request parameters); strings are converted where unambiguous.

        `stop` may be one string. Guided decoding is read by `read_guided_decoding`; TensorRT-LLM's names are
        accepted. Raises `InvalidParameter` for an unknown name, a wrong type or a bad value.
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
            if value is None and (name in _NULLABLE or known[name].default is None):
                continue
            try:
                converted[name] = msgspec.convert(coerce(name, value), known[name].type, strict=False)
            except (msgspec.ValidationError, ValueError, TypeError) as error:
                raise InvalidParameter(given, str(error)) from None
        return cls(**converted)


ALIASES = {
    "len_penalty": "length_penalty",
    "logits_post_processor_name": "logits_processor",
    "min_length": "min_tokens",
    "num_return_sequences": "n",
    "random_seed": "seed",
    "runtime_top_k": "top_k",
    "runtime_top_p": "top_p",
    "runtime_top_p_decay": "top_p_decay",
    "runtime_top_p_min": "top_p_min",
    "runtime_top_p_reset_ids": "top_p_reset_ids",
}
"""TensorRT-LLM's names of parameters."""


def coerce(name: str, value: Any) -> Any:
    """Return `value` of the parameter `name` in a form that msgspec converts to the field's type."""
    if name in ("stop", "bad_words") and isinstance(value, str):
        return (value,)
    if name == "embedding_bias" and not isinstance(value, bytes):
        return np.asarray(value, np.float32).tobytes()
    if name == "early_stopping" and not isinstance(value, bool):
        return _early_stopping(value)
    return value


def _early_stopping(value: Any) -> bool | str:
    """Convert TensorRT-LLM's numbers: 0, 1, and any other number for "never"."""
    if isinstance(value, str) and value.lower() in ("false", "true"):
        return value.lower() == "true"
    if value == "never":
        return "never"
    number = int(value)
    return bool(number) if number in (0, 1) else "never"


@cache
def _fields_by_name(struct: type[msgspec.Struct]) -> dict[str, msgspec.structs.FieldInfo]:
    """Return the fields of a struct by name. Cached, because resolving the annotations takes 1 ms."""
    return {field.name: field for field in msgspec.structs.fields(struct)}


_NULLABLE = frozenset({"stop", "stop_token_ids", "stop_words", "bad_words", "logit_bias", "embedding_bias"})


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


AUTO, NO_DEFAULTS = "auto", "vllm"
"""Values of the option `generation_config`: the checkpoint's file, or no file. Others are a path or repository."""


class SamplingDefaults(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Default sampling parameters, with the names in `generation_config.json`; None if not set there.

    `limits_tokens`: `max_new_tokens` is also the maximum of requests. Raises `InvalidParameter` with the field's name.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    max_new_tokens: int | None = None
    limits_tokens: bool = False

    def __post_init__(self) -> None:
        try:
            self.params()
        except InvalidParameter as error:
            raise InvalidParameter(_FILE_NAMES.get(error.field, error.field), error.message) from None

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any], *, limits_tokens: bool = False) -> SamplingDefaults:
        """Create from the contents of the file. Null values and names other than `DEFAULT_NAMES` are ignored."""
        values_by_name = {
            name: _typed(name, value) for name in DEFAULT_NAMES if (value := values.get(name)) is not None
        }
        return cls(**values_by_name, limits_tokens=limits_tokens and "max_new_tokens" in values_by_name)

    def given(self) -> dict[str, Any]:
        """Return the defaults that are set, without `max_new_tokens`, by field of `SamplingParams`."""
        return {name: value for name in _SAMPLING_NAMES if (value := getattr(self, name)) is not None}

    def max_tokens(self, requested: int | None) -> int | None:
        """Return the `max_tokens` of a request with a `max_tokens` of `requested`; None for no limit."""
        if requested is None:
            return self.max_new_tokens
        limit = self.max_new_tokens if self.limits_tokens else None
        return requested if limit is None else min(requested, limit)

    def params(self) -> SamplingParams:
        """Return the sampling parameters of a request without parameters."""
        return SamplingParams(**self.given(), max_tokens=self.max_new_tokens)

    def __str__(self) -> str:
        texts = [f"{name} {value}" for name, value in self.given().items()]
        if self.max_new_tokens is not None:
            texts.append(f"max_new_tokens {self.max_new_tokens}{' at most' if self.limits_tokens else ''}")
        return ", ".join(texts)


_DEFAULT_TYPES: dict[str, type[int | float]] = {
    "temperature": float,
    "top_p": float,
    "top_k": int,
    "min_p": float,
    "repetition_penalty": float,
    "presence_penalty": float,
    "frequency_penalty": float,
    "max_new_tokens": int,
}
DEFAULT_NAMES = tuple(_DEFAULT_TYPES)
"""Names of sampling defaults in `generation_config.json`."""
_SAMPLING_NAMES = tuple(name for name in DEFAULT_NAMES if name != "max_new_tokens")
_FILE_NAMES = {"max_tokens": "max_new_tokens"}


def _typed(name: str, value: Any) -> Any:
    try:
        return msgspec.convert(value, _DEFAULT_TYPES[name])
    except msgspec.ValidationError as error:
        raise InvalidParameter(name, f"{error}: {value!r}") from None


def max_new_tokens_is_limit(source: str, override: Mapping[str, Any]) -> bool:
    """Return whether `max_new_tokens` limits all requests. As in vLLM, it does in an explicit file or in the override.

    `source` and `override` are the options `generation_config` and `override_generation_config`.
    """
    return source not in (AUTO, NO_DEFAULTS) or "max_new_tokens" in override

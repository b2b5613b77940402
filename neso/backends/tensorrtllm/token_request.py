"""Conversion of request tensors to generation requests, one per batch row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from neso.backends.llm.tensor_request import DRAFT_NAMES, adapter_of_task, read_draft
from neso.backends.request_tensors import TensorField
from neso.backends.tensorrtllm.settings import Settings
from neso.backends.tensorrtllm.signature import INPUTS
from neso.generation import GenerationRequest, InvalidParameter, LoraRequest, SamplingParams
from neso.generation.request import DEFAULT_PRIORITY, CacheRetention, RetainedRange
from neso.server.errors import InvalidArgument
from neso.server.inference_request import InferenceRequest, ParameterValue
from neso.server.tensor import DataType, Tensor

NO_END = -1
"""`end_id` of a request without an end token."""

_SAMPLING = (
    *("temperature", "runtime_top_k", "runtime_top_p", "runtime_top_p_min", "runtime_top_p_decay"),
    *("runtime_top_p_reset_ids", "repetition_penalty", "presence_penalty", "frequency_penalty"),
    *(
        "length_penalty",
        "len_penalty",
        "early_stopping",
        "beam_search_diversity_rate",
        "beam_width",
        "num_return_sequences",
    ),
    *("min_length", "min_tokens", "random_seed", "seed"),
)
"""Scalar inputs that are sampling parameters. If a parameter has two names, the newer name is later."""

_NAMES = {
    "length_penalty": "len_penalty",
    "logits_processor": "logits_post_processor_name",
    "lora_name": "lora_task_id",
    "max_tokens": "request_output_len",
    "n": "num_return_sequences",
    "prompt": "input_ids",
    "stop_words": "stop_words_list",
    "bad_words": "bad_words_list",
    "stop_token_ids": "end_id",
    "stream": "streaming",
    "top_k": "runtime_top_k",
    "top_p": "runtime_top_p",
    "top_p_decay": "runtime_top_p_decay",
    "top_p_min": "runtime_top_p_min",
    "top_p_reset_ids": "runtime_top_p_reset_ids",
}
"""Parameter name -> tensor name, for error messages."""

_UNSUPPORTED = {
    "encoder_input_features": "models with an encoder are not run",
    "encoder_output_lengths": "models with an encoder are not run",
    "cross_attention_mask": "models with an encoder are not run",
    "mrope_rotary_cos_sin": "multimodal rotary embeddings (mRoPE) are not supported",
    "mrope_position_deltas": "multimodal rotary embeddings (mRoPE) are not supported",
    "context_phase_params": "disaggregated serving is not supported",
    "lookahead_window_size": "there is no lookahead decoding; use `speculative: ngram`",
    "lookahead_ngram_size": "there is no lookahead decoding; use `speculative: ngram`",
    "lookahead_verification_set_size": "there is no lookahead decoding; use `speculative: ngram`",
}
"""Unsupported inputs, with the reason."""


_SCALARS = {field.name: field for field in INPUTS if field.dims == (1,)}
"""Inputs with one element a row."""
_PARAMETER_TYPES: dict[str, tuple[type, ...]] = {
    "b": (bool,),
    "i": (int,),
    "u": (int,),
    "f": (int, float),
    "O": (str,),
}
"""Types of a request parameter, by the kind of the input's dtype."""


@dataclass(frozen=True, slots=True)
class TokenEmbeddings:
    """Sizes of a model's token embeddings. `replaceable`: the runner accepts embeddings in place of tokens."""

    vocab_size: int
    hidden_size: int
    replaceable: bool


@dataclass(frozen=True, slots=True)
class TokenRequest:
    """One row of a batch.

    - prompt: as sent; the prompt of `generation` has virtual tokens instead of tokens outside the vocabulary
    - end_id: token that ends the sequence and is not part of the output; `NO_END` for none
    - requested: names of the inputs `return_<name>` that are true
    """

    generation: GenerationRequest
    prompt: list[int]
    streaming: bool
    exclude_input: bool
    end_id: int
    pad_id: int
    requested: frozenset[str]

    @property
    def num_responses(self) -> int:
        """Number of separate responses: one per sequence, or one for all beams."""
        sampling = self.generation.sampling
        return 1 if sampling.uses_beams else sampling.n


class RequestReader:
    """Reads the requests of a model.

    - embeddings: sizes of the model's token embeddings
    - batched: tensors have a batch dimension
    - warn: called with warnings about requests, which the caller should not log more than once
    """

    def __init__(
        self,
        settings: Settings,
        embeddings: TokenEmbeddings,
        *,
        batched: bool,
        decoupled: bool,
        warn: Callable[[str], None],
    ) -> None:
        self._settings = settings
        self._embeddings = embeddings
        self._batched = batched
        self._decoupled = decoupled
        self._warn = warn

    def rows(self, request: InferenceRequest) -> list[TokenRequest]:
        """Read all rows of a request. Raises `InvalidArgument`."""
        first = request.inputs.get("input_ids")
        if first is None:
            raise InvalidArgument("input_ids: is missing")
        count = first.shape[0] if self._batched else 1
        if not count:
            raise InvalidArgument("input_ids: has no rows")
        rows = [self._read(_Row(request, number if self._batched else None)) for number in range(count)]
        if not self._decoupled:
            _check_single(rows)
        return rows

    def read_parameters(self, request: InferenceRequest) -> None:
        """Add the request parameters that are names of inputs to the inputs. Raises `InvalidArgument`.

        In a JSON request to an ensemble, members that are no inputs of the ensemble become parameters.
        """
        for name, value in request.parameters.items():
            field = _SCALARS.get(_NAMES.get(name, name))
            if field is None:
                self._warn(f"request parameter '{name}' has no effect")
            elif field.name not in request.inputs:
                request.inputs[field.name] = self._scalar_tensor(name, field, value)

    def _scalar_tensor(self, name: str, field: TensorField, value: ParameterValue) -> Tensor:
        datatype = DataType.from_config(field.data_type)
        expected = _PARAMETER_TYPES[datatype.dtype.kind]
        if not isinstance(value, expected) or (isinstance(value, bool) and bool not in expected):
            raise InvalidArgument(f"{name}: must be of the type {datatype.value}, got {value!r}")
        if isinstance(value, str):
            array = np.array([value.encode()], np.object_)
        else:
            try:
                array = np.array([value]).astype(datatype.dtype)
                in_range = bool(array[0] == value) or isinstance(value, float)
            except OverflowError:
                in_range = False
            if not in_range:
                raise InvalidArgument(f"{name}: {value} is out of the range of {datatype.value}")
        return Tensor(field.name, datatype, array[np.newaxis] if self._batched else array)

    def _read(self, row: _Row) -> TokenRequest:
        for name, reason in _UNSUPPORTED.items():
            if row.has(name):
                raise InvalidArgument(f"{name}: {reason}")
        if row.scalar("skip_cross_attn_blocks", False):
            raise InvalidArgument("skip_cross_attn_blocks: models with an encoder are not run")
        # Preprocessing sends one decoder start token for all models; decoder-only models ignore it.
        if row.has("decoder_input_ids") and row.array("decoder_input_ids").size > 1:
            raise InvalidArgument("decoder_input_ids: models with an encoder are not run")
        requested, streaming = row.requested(), bool(row.scalar("streaming", False))
        end_id = row.scalar("end_id", NO_END)
        try:
            sampling = SamplingParams.from_mapping(self._sampling(row, end_id, requested))
            retention = row.retention()
        except InvalidParameter as error:
            if error.field == "min_tokens" and not row.has("min_tokens"):
                raise InvalidArgument(f"min_length: {error.message}") from None
            raise convert_error(error) from None
        if row.has("prompt_vocab_size") and not row.has("prompt_embedding_table"):
            self._warn("prompt_vocab_size has no effect without prompt_embedding_table")
        ids = row.prompt()
        sent: list[int] = ids.tolist()
        prompt, table = self._embeddings_of(ids, sent, row.optional("prompt_embedding_table"))
        return TokenRequest(
            generation=GenerationRequest(
                prompt,
                sampling,
                priority=row.request.priority,
                queue_timeout_ms=row.request.timeout_us / 1000 if row.request.timeout_us else None,
                lora=row.adapter(),
                prompt_embedding_table=table,
                prompt_vocab_size=row.scalar("prompt_vocab_size") or None,
                draft=read_draft(*(row.optional(name) for name in DRAFT_NAMES)),
                detokenize=False,
                stream=streaming,
                retention=retention,
            ),
            prompt=sent,
            streaming=streaming,
            exclude_input=bool(row.scalar("exclude_input_in_output", self._settings.exclude_input_in_output)),
            end_id=end_id,
            pad_id=row.scalar("pad_id", NO_END),
            requested=requested,
        )

    def _embeddings_of(
        self, ids: npt.NDArray[Any], prompt: list[int], table: npt.NDArray[Any] | None
    ) -> tuple[list[int], npt.NDArray[Any] | None]:
        """Return the prompt and the table of its virtual tokens, whose ids start at the vocabulary size.

        As in TensorRT-LLM, without a table the embedding of a token outside the vocabulary is zero.
        """
        embeddings = self._embeddings
        vocab_size = embeddings.vocab_size
        if table is not None:
            if not (ids >= vocab_size).any():
                self._warn(
                    "prompt_embedding_table has no effect: input_ids has no virtual tokens, whose ids start at "
                    f"{vocab_size}, the vocabulary size; a prompt given as text never has"
                )
            return prompt, table
        outside = (ids < 0) | (ids >= vocab_size)
        if not (embeddings.replaceable and outside.any()):
            return prompt, None
        self._warn("input_ids has tokens outside the vocabulary, their embeddings are zero")
        replaced: list[int] = np.where(outside, vocab_size, ids).tolist()
        return replaced, np.zeros((1, embeddings.hidden_size), np.float32)

    def _sampling(self, row: _Row, end_id: int, requested: frozenset[str]) -> dict[str, Any]:
        values: dict[str, Any] = {
            # TensorRT-LLM's defaults that differ from Neso's.
            "min_tokens": 1,
            "len_penalty": 0.0,
            "early_stopping": True,
            "max_tokens": row.scalar("request_output_len"),
            "ignore_eos": True,
            "stop_token_ids": () if end_id == NO_END else (end_id,),
        }
        for name in _SAMPLING:
            value = row.scalar(name)
            if value is not None:
                values[_CANONICAL.get(name, name)] = value
        self._choose_decoding(values)
        for name in ("stop_words_list", "bad_words_list"):
            if row.has(name):
                values[name.removesuffix("_list")] = read_words(name, row.array(name))
        if row.has("embedding_bias"):
            values["embedding_bias"] = row.array("embedding_bias")
        for name in ("guided_decoding_guide_type", "guided_decoding_guide", "logits_post_processor_name"):
            if row.has(name):
                values[name] = row.text(name)
        if "log_probs" in requested:
            values["logprobs"] = 0
            values["normalize_logprobs"] = self._settings.normalize_log_probs
        for name in requested & {"context_logits", "generation_logits"}:
            values[f"return_{name}"] = True
        return values

    def _choose_decoding(self, values: dict[str, Any]) -> None:
        """Choose beam search, sampling or greedy decoding from `decoding_mode`, `beam_width`, `top_k` and `top_p`."""
        width, mode = values.get("beam_width", 1), self._settings.decoding_mode
        if width > self._settings.max_beam_width:
            raise InvalidArgument(
                f"beam_width: is {width}, max_beam_width of this model is {self._settings.max_beam_width}"
            )
        if width > 1:
            values.setdefault("num_return_sequences", width)
        if mode == "top_k":
            values.pop("runtime_top_p", None)
        elif mode == "top_p":
            values.pop("runtime_top_k", None)
        for name in ("runtime_top_p", "runtime_top_p_min"):
            if values.get(name, 1) <= 0:
                del values[name]
        sampled = values.get("runtime_top_k", 0) > 0 or "runtime_top_p" in values
        if width == 1 and (mode == "beam_search" or not sampled) and values.get("temperature", 0) >= 0:
            values["temperature"] = 0.0


_CANONICAL = {"min_length": "min_tokens", "random_seed": "seed", "length_penalty": "len_penalty"}


def _check_single(rows: list[TokenRequest]) -> None:
    """Raise `InvalidArgument` for requests with several responses if the model is not decoupled."""
    if len(rows) > 1:
        raise InvalidArgument(
            "a batch of several sequences needs a decoupled model, because each sequence has its own response"
        )
    (row,) = rows
    if row.streaming:
        raise InvalidArgument(
            "streaming: is only supported by a decoupled model (model_transaction_policy { decoupled: true })"
        )
    if row.num_responses > 1:
        raise InvalidArgument(
            "num_return_sequences: above 1 needs a decoupled model, because each sequence has its own response"
        )


def convert_error(error: InvalidParameter) -> InvalidArgument:
    """Convert a parameter error; the message contains the name of the parameter's tensor."""
    return InvalidArgument(f"{_NAMES.get(error.field, error.field)}: {error.message}")


@dataclass(frozen=True, slots=True)
class _Row:
    """The tensors of one row. `number` is None without a batch dimension. Empty tensors count as absent."""

    request: InferenceRequest
    number: int | None

    def has(self, name: str) -> bool:
        tensor = self.request.inputs.get(name)
        return tensor is not None and tensor.array.size > 0

    def scalar(self, name: str, default: Any = None) -> Any:
        """Return the single element of a tensor as a Python value."""
        if not self.has(name):
            return default
        values = self.request.inputs[name].array
        count = 1 if self.number is None else values.shape[0]
        if values.size != count:
            raise InvalidArgument(f"{name}: must have one element a row, got the shape {list(values.shape)}")
        return values.reshape(-1)[self.number or 0].item()

    def array(self, name: str) -> npt.NDArray[Any]:
        values = self.request.inputs[name].array
        return values if self.number is None else values[self.number]

    def optional(self, name: str) -> npt.NDArray[Any] | None:
        return self.array(name) if self.has(name) else None

    def text(self, name: str) -> str:
        values = self.array(name).reshape(-1)
        try:
            text: str = values[0].decode()
        except UnicodeDecodeError:
            raise InvalidArgument(f"{name}: is not UTF-8") from None
        return text

    def prompt(self) -> npt.NDArray[Any]:
        """Return the first `input_lengths` tokens of `input_ids`; the rest is padding."""
        ids = self.array("input_ids").reshape(-1)
        length = self.scalar("input_lengths", len(ids))
        if not 0 < length <= len(ids):
            raise InvalidArgument(f"input_lengths: is {length}, input_ids has {len(ids)} tokens")
        return ids[:length]

    def requested(self) -> frozenset[str]:
        names = (name for name in self.request.inputs if name.startswith("return_"))
        return frozenset(name.removeprefix("return_") for name in names if self.scalar(name, False))

    def retention(self) -> CacheRetention | None:
        return read_retention(
            [self.optional(name) for name in RANGES],
            self.scalar("retention_decode_priority"),
            self.scalar("retention_decode_duration_ms"),
        )

    def adapter(self) -> LoraRequest | None:
        weights, config = self.optional("lora_weights"), self.optional("lora_config")
        task = self.scalar("lora_task_id")
        if task is not None:
            return adapter_of_task(task, weights, config)
        if weights is not None or config is not None:
            raise InvalidArgument("lora_weights: needs lora_task_id")
        return None


RANGES = tuple(f"retention_token_range_{what}" for what in ("starts", "ends", "priorities", "durations_ms"))
"""Tensors with one value per token range. -1 as end: end of the prompt; -1 as duration: no time limit."""
_UNSET = -1


def read_retention(
    ranges: list[npt.NDArray[Any] | None], decode_priority: int | None, decode_duration_ms: int | None
) -> CacheRetention | None:
    """Read the KV-cache retention of a request. `ranges`: the tensors `RANGES`, None for absent ones.

    Raises `InvalidArgument`, `InvalidParameter`.
    """
    given = {
        name: values.reshape(-1).tolist()
        for name, values in zip(RANGES, ranges, strict=True)
        if values is not None
    }
    if not given and decode_priority is None and decode_duration_ms is None:
        return None
    if RANGES[0] not in given and given:
        raise InvalidArgument(f"{next(iter(given))}: needs {RANGES[0]}")
    count = len(given.get(RANGES[0], ()))
    given.setdefault(RANGES[3], [_UNSET] * count)
    for name in RANGES:
        if len(given.setdefault(name, [])) != count:
            raise InvalidArgument(f"{name}: must have as many values as {RANGES[0]}, {count}")
    return CacheRetention(
        [
            RetainedRange(start, _optional(end), priority, _optional(duration))
            for start, end, priority, duration in zip(*(given[name] for name in RANGES), strict=True)
        ],
        DEFAULT_PRIORITY if decode_priority is None else decode_priority,
        _optional(decode_duration_ms),
    )


def _optional(number: int | None) -> int | None:
    return None if number == _UNSET else number


Words = tuple[tuple[int, ...], ...]


def read_words(name: str, array: npt.NDArray[Any]) -> Words:
    """Read a word list int32[2, N]: concatenated token ids, and the end offset of each word, then -1.

    [[5, 7, 9], [1, 3, -1]] contains the words (5,) and (7, 9). Raises `InvalidArgument`.
    """
    if array.ndim != 2 or len(array) != 2:
        raise InvalidArgument(f"{name}: must have the shape [2, -1], got {list(array.shape)}")
    tokens, ends = array.tolist()
    words = []
    start = 0
    for end in ends:
        if end == -1:
            break
        if not start < end <= len(tokens):
            raise InvalidArgument(
                f"{name}: the second row must say where words end: ascending offsets, at most {len(tokens)}, "
                f"then -1; got {ends}"
            )
        words.append(tuple(tokens[start:end]))
        start = end
    return tuple(words)

"""Sampling parameters as input tensors: one per parameter (TensorRT-LLM), or one JSON text (vLLM)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import orjson

from neso.generation import GuidedDecoding, InvalidParameter, SamplingParams
from neso.generation.sampling_params import ALIASES
from neso.server.signature import Signature, TensorSpec
from neso.server.tensor import DataType, Tensor

Value = str | bool | int | float


class InputTensors:
    """Input tensors of one request, with the data types and shapes declared by the model."""

    def __init__(self, signature: Signature) -> None:
        self._signature = signature
        self.tensors: dict[str, Tensor] = {}

    def declared(self, names: Sequence[str], kind: type) -> TensorSpec | None:
        """Return the first input of `names` with elements of `kind` (see `kind_of`), or None."""
        for name in names:
            spec = self._signature.inputs.get(name)
            if spec is not None and kind_of(spec) is kind:
                return spec
        return None

    def put(self, spec: TensorSpec, values: Sequence[Value], field: str) -> None:
        """Add an input. Raises `InvalidParameter(field, …)` for values that do not match its shape or data type."""
        shape = _shape(spec, len(values), field)
        if self._signature.max_batch_size:
            shape = (1, *shape)
        array = _array(spec, values, field)
        self.tensors[spec.name] = Tensor(spec.name, spec.datatype, array.reshape(shape))


def kind_of(spec: TensorSpec) -> type:
    """Return the Python type of the elements: `str`, `bool`, or `float` for all numeric data types."""
    return {DataType.BYTES: str, DataType.BOOL: bool}.get(spec.datatype, float)


def _shape(spec: TensorSpec, count: int, field: str) -> tuple[int, ...]:
    """Return the shape for `count` values: they fill the last variable dimension; other variable dimensions are 1."""
    free = max((axis for axis, extent in enumerate(spec.dims) if extent == -1), default=None)
    shape = tuple(
        count if axis == free else 1 if extent == -1 else extent for axis, extent in enumerate(spec.dims)
    )
    if math.prod(shape) != count:
        raise InvalidParameter(
            field, f"the model's input '{spec.name}' takes {math.prod(shape)} of them, got {count}"
        )
    return shape


def _array(spec: TensorSpec, values: Sequence[Value], field: str) -> np.ndarray:
    if spec.datatype is DataType.BYTES:
        texts = np.empty(len(values), np.object_)
        texts[:] = [str(value).encode() for value in values]
        return texts
    dtype = spec.datatype.dtype
    if dtype.kind in "iu":
        limits = np.iinfo(dtype)
        for value in values:
            if not isinstance(value, bool | int) and not value.is_integer():  # type: ignore[union-attr]
                raise InvalidParameter(field, f"the model takes integers only, got {value}")
            if not limits.min <= int(value) <= limits.max:
                raise InvalidParameter(field, f"the model takes {limits.min} to {limits.max}, got {value}")
    return np.array(values).astype(dtype)


NO_INPUT = "the model has no input for it"
STOP = ("stop_words", "stop", "sampling_param_stop")
BAD_WORDS = ("bad_words",)
GUIDE_TYPE, GUIDE = ("guided_decoding_guide_type",), ("guided_decoding_guide",)

DEFAULTS = SamplingParams()
ALWAYS_SENT = ("max_tokens", "temperature", "top_p")
"""Sent even if the client did not set them: OpenAI's defaults differ from the model's."""
_NOT_SCALAR = frozenset(
    {
        "n",
        "stop",
        "stop_token_ids",
        "stop_words",
        "bad_words",
        "allowed_token_ids",
        "logit_bias",
        "embedding_bias",
        "logprobs",
        "include_stop_str_in_output",
        "shown_special_tokens",  # set by parsers, not by clients
        "guided_decoding",
        "logits_processor",
    }
)
_NO_INPUT_EXISTS = ("stop_token_ids", "stop_words", "allowed_token_ids", "logit_bias", "embedding_bias")


def names_of(parameter: str) -> tuple[str, ...]:
    """Return the possible input names of a parameter: its name, TensorRT-LLM's, and that of TensorRT-LLM's LLM API."""
    aliases = (alias for alias, name in ALIASES.items() if name == parameter)
    return (parameter, *aliases, f"sampling_param_{parameter}")


SCALARS = {
    field.name: names_of(field.name)
    for field in msgspec.structs.fields(SamplingParams)
    if field.name not in _NOT_SCALAR
}
PROCESSOR = names_of("logits_processor")
NAMES = frozenset(name for names in SCALARS.values() for name in names).union(
    STOP, BAD_WORDS, GUIDE_TYPE, GUIDE, PROCESSOR
)
"""All known input names."""


def accepts_max_tokens(signature: Signature) -> bool:
    """Whether a model has an input for `max_tokens`."""
    return InputTensors(signature).declared(SCALARS["max_tokens"], float) is not None


def write_sampling(inputs: InputTensors, sampling: SamplingParams) -> None:
    """Add the sampling inputs of one sequence. Raises `InvalidParameter` for parameters without an input.

    `n` has no input. `stop` needs no input, because `response_text` cuts the text at stop strings.
    """
    for name in _NO_INPUT_EXISTS:
        if getattr(sampling, name) != getattr(DEFAULTS, name):
            raise InvalidParameter(name, NO_INPUT)
    if sampling.shown_special_tokens and inputs.declared(SCALARS["skip_special_tokens"], bool) is not None:
        sampling = msgspec.structs.replace(sampling, skip_special_tokens=False)  # the model shows all or none
    for name, names in SCALARS.items():
        _write_scalar(inputs, name, names, getattr(sampling, name))
    _write_words(inputs, "stop", STOP, sampling.stop, required=False)
    _write_words(inputs, "bad_words", BAD_WORDS, sampling.bad_words)
    processor = sampling.logits_processor
    _write_words(inputs, "logits_processor", PROCESSOR, [] if processor is None else [processor])
    if sampling.guided_decoding is not None:
        _write_guide(inputs, sampling.guided_decoding)


def _write_scalar(inputs: InputTensors, name: str, names: Sequence[str], value: Any) -> None:
    if name == "top_k":
        value = max(int(value), 0)  # -1 also means no limit
    default = getattr(DEFAULTS, name)
    kind = bool if isinstance(value if default is None else default, bool) else float
    spec = None if isinstance(value, str) else inputs.declared(names, kind)
    if spec is None:
        if value != default and name != "max_tokens":  # enforced by `response_text`
            raise InvalidParameter(name, NO_INPUT)
    elif (value is not None and (value != default or name in ALWAYS_SENT)) or not spec.optional:
        inputs.put(spec, [_number(name, value)], name)


def _number(name: str, value: Any) -> Value:
    if value is None:
        return 1 if name == "best_of" else 0
    if name == "seed" and value < 0:
        return int(value) + 2**64  # same 64-bit pattern
    return value  # type: ignore[no-any-return]


def _write_words(
    inputs: InputTensors, field: str, names: Sequence[str], words: Sequence[Any], *, required: bool = True
) -> None:
    spec = inputs.declared(names, str)
    if spec is None:
        if words and required:
            raise InvalidParameter(field, NO_INPUT)
    elif words:
        if not all(isinstance(word, str) for word in words):
            raise InvalidParameter(field, "the model takes text, not token ids")
        inputs.put(spec, list(words), field)
    elif not spec.optional:
        inputs.put(spec, [""], field)


def _write_guide(inputs: InputTensors, guide: GuidedDecoding) -> None:
    """Write TensorRT-LLM's pair of inputs for guided decoding."""
    kind, text = _trtllm_guide(guide)
    kind_spec, text_spec = inputs.declared(GUIDE_TYPE, str), inputs.declared(GUIDE, str)
    if kind_spec is None or (text and text_spec is None):
        raise InvalidParameter(guide.field, NO_INPUT)
    inputs.put(kind_spec, [kind], guide.field)
    if text_spec is not None and text:
        inputs.put(text_spec, [text], guide.field)


def _trtllm_guide(guide: GuidedDecoding) -> tuple[str, str]:
    """Return type and text of the guide; an empty text means any JSON object."""
    if guide.whitespace_pattern is not None or guide.disable_any_whitespace:
        raise InvalidParameter(guide.field, "the model does not support whitespace options")
    if guide.json_object or guide.json is True:
        return "json", ""
    if guide.choice is not None:
        return "regex", "|".join(f"({_escaped(choice)})" for choice in guide.choice)
    for kind, text in (
        ("json_schema", guide.json),
        ("regex", guide.regex),
        ("ebnf_grammar", guide.grammar),
        ("structural_tag", guide.structural_tag),
    ):
        if text is not None:
            return kind, str(text)
    raise AssertionError("exactly one kind is set")


def _escaped(text: str) -> str:
    return "".join(f"\\{character}" if character in r"\.^$|?*+()[]{}" else character for character in text)


_NOT_IN_VLLM = (
    "stop_words",
    "embedding_bias",
    "return_context_logits",
    "return_generation_logits",
    "prompt_logprobs",
)
_GUIDE_FIELDS = (
    "json",
    "regex",
    "choice",
    "grammar",
    "json_object",
    "structural_tag",
    "whitespace_pattern",
    "disable_any_whitespace",
)


def sampling_json(sampling: SamplingParams, lora_name: str = "") -> str:
    """Serialize non-default parameters to JSON with the names of vLLM's `SamplingParams`. Raises `InvalidParameter`."""
    values: dict[str, Any] = {}
    for name in SamplingParams.__struct_fields__:
        value = getattr(sampling, name)
        given = value != getattr(DEFAULTS, name)
        if given and name in _NOT_IN_VLLM:
            raise InvalidParameter(name, NO_INPUT)
        if value is not None and (given or name in ALWAYS_SENT):
            values[name] = value
    if values.pop("shown_special_tokens", ()):
        values["skip_special_tokens"] = False  # the model shows all or none
    guide: GuidedDecoding | None = values.pop("guided_decoding", None)
    if guide is not None:
        values["structured_outputs"] = _guide_json(guide)
    if "logit_bias" in values:
        values["logit_bias"] = {str(token): bias for token, bias in sampling.logit_bias.items()}
    if lora_name:
        values["lora_name"] = lora_name
    return orjson.dumps(values).decode()


def _guide_json(guide: GuidedDecoding) -> str:
    fields = {name: getattr(guide, name) for name in _GUIDE_FIELDS}
    if fields["json"] is True:
        fields["json"], fields["json_object"] = None, True
    return orjson.dumps(
        {name: value for name, value in fields.items() if value not in (None, False)}
    ).decode()

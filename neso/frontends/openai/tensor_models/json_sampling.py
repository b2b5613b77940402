"""Sampling parameters as the one JSON text that vLLM's convention has for them."""

from __future__ import annotations

from typing import Any

import orjson

from neso.frontends.openai.tensor_models.sampling_inputs import ALWAYS_GIVEN, DEFAULTS, NO_INPUT
from neso.generation import GuidedDecoding, InvalidParameter, SamplingParams

_REFUSED = (
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
    """What differs from the defaults, by the names of vLLM's `SamplingParams`. Raises `InvalidParameter`."""
    values: dict[str, Any] = {}
    for name in SamplingParams.__struct_fields__:
        value = getattr(sampling, name)
        given = value != getattr(DEFAULTS, name)
        if given and name in _REFUSED:
            raise InvalidParameter(name, NO_INPUT)
        if value is not None and (given or name in ALWAYS_GIVEN):
            values[name] = value
    if values.pop("shown_special_tokens", ()):
        values["skip_special_tokens"] = False  # there it is all or none
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

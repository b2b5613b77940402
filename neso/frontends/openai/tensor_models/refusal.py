"""What a model says against its inputs, in words about the client's fields."""

from __future__ import annotations

import re

from neso.frontends.openai.tensor_models import sampling_inputs
from neso.frontends.openai.tensor_models.text_face import LORA_NAME, LORA_TASK
from neso.generation import InvalidParameter, SamplingParams
from neso.server.errors import ErrorCode, ServerError

_AT_FAULT = re.compile(r"(?:^|, )(\w+): (.+)", re.DOTALL)
_PROMPT = ("text_input", "input_ids", "input_lengths")


def about_field(error: ServerError, sampling: SamplingParams) -> Exception:
    """The error, about the field that made the input which it names, as `NAME: …`; else as it is."""
    named = _AT_FAULT.search(error.message) if error.code is ErrorCode.INVALID_ARG else None
    field = None if named is None else _field(named[1], sampling)
    return error if named is None or field is None else InvalidParameter(field, named[2])


def _field(name: str, sampling: SamplingParams) -> str | None:
    if name in _PROMPT:
        return "prompt"
    guide = sampling.guided_decoding
    if name in (*sampling_inputs.GUIDE, *sampling_inputs.GUIDE_TYPE):
        return None if guide is None else guide.field
    if name in sampling_inputs.STOP:
        return "stop"
    if name in (*LORA_NAME, *LORA_TASK):
        return "model"  # whose name has the adapter's in it
    return next((field for field, names in sampling_inputs.SCALARS.items() if name in names), None)

"""Errors about input tensors, mapped to request fields."""

from __future__ import annotations

import pytest

from neso.frontends.openai.tensor_models.language_model import to_parameter_error
from neso.generation import GuidedDecoding, InvalidParameter, SamplingParams
from neso.server.errors import InternalError, InvalidArgument

GUIDE = SamplingParams(guided_decoding=GuidedDecoding(regex="(", source_field="response_format"))


@pytest.mark.parametrize(
    ("message", "sampling", "field", "reported"),
    [
        ("in ensemble 'e', guided_decoding_guide: no regex", GUIDE, "response_format", "no regex"),
        ("guided_decoding_guide_type: what?", GUIDE, "response_format", "what?"),
        ("in ensemble 'e', input_lengths: is 0", SamplingParams(), "prompt", "is 0"),
        ("random_seed: too large: 2", SamplingParams(), "seed", "too large: 2"),
        ("lora_task_id: 7 is not cached", SamplingParams(), "model", "7 is not cached"),
        ("stop_words: too many", SamplingParams(), "stop", "too many"),
    ],
)
def test_error_names_the_request_field(
    message: str, sampling: SamplingParams, field: str, reported: str
) -> None:
    error = to_parameter_error(InvalidArgument(message), sampling)
    assert isinstance(error, InvalidParameter)
    assert (error.field, error.message) == (field, reported)


@pytest.mark.parametrize(
    "error",
    [
        InvalidArgument("something is wrong"),
        InvalidArgument("my_own_input: something is wrong"),
        InvalidArgument("guided_decoding_guide: but nobody gave one"),
        InternalError("seed: the model broke"),
    ],
)
def test_other_errors_are_unchanged(error: Exception) -> None:
    assert to_parameter_error(error, SamplingParams()) is error  # type: ignore[arg-type]

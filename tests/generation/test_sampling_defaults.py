"""Sampling defaults from `generation_config.json`."""

from __future__ import annotations

import math
from typing import Any

import pytest

from neso.generation import InvalidParameter, SamplingDefaults, SamplingParams

QWEN: dict[str, Any] = {
    "bos_token_id": 151643,
    "do_sample": True,
    "eos_token_id": [151645, 151643],
    "pad_token_id": 151643,
    "temperature": 0.6,
    "top_k": 20,
    "top_p": 0.95,
    "min_p": None,
    "transformers_version": "4.51.0",
}


def test_typical_file():
    defaults = SamplingDefaults.from_mapping(QWEN)
    assert defaults.given() == {"temperature": 0.6, "top_k": 20, "top_p": 0.95}
    assert defaults.params() == SamplingParams(temperature=0.6, top_k=20, top_p=0.95)
    assert str(defaults) == "temperature 0.6, top_p 0.95, top_k 20"


def test_file_without_defaults():
    ids = {"bos_token_id": 0, "eos_token_id": [2, 0], "max_length": 20, "num_beams": 4}
    assert SamplingDefaults.from_mapping(ids) == SamplingDefaults()
    assert SamplingDefaults().params() == SamplingParams()


def test_integers_are_accepted_for_floats():
    defaults = SamplingDefaults.from_mapping({"temperature": 0, "repetition_penalty": 1, "top_k": -1})
    assert defaults.params() == SamplingParams(temperature=0.0, top_k=-1)


@pytest.mark.parametrize(
    ("limits", "asked", "gets"),
    [(False, None, 8), (False, 100, 100), (True, None, 8), (True, 100, 8), (True, 3, 3), (True, 0, 0)],
)
def test_max_tokens_of_a_request(limits, asked, gets):
    defaults = SamplingDefaults.from_mapping({"max_new_tokens": 8}, limits_tokens=limits)
    assert defaults.max_tokens(asked) == gets
    assert str(defaults) == "max_new_tokens 8" + " at most" * limits


def test_no_limit_without_max_new_tokens():
    defaults = SamplingDefaults.from_mapping({"max_new_tokens": None}, limits_tokens=True)
    assert defaults == SamplingDefaults() and defaults.max_tokens(None) is None
    assert defaults.max_tokens(7) == 7


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("temperature", "0.5", "Expected `float`, got `str`"),
        ("temperature", True, "got `bool`"),
        ("temperature", math.nan, "not a finite number"),
        ("temperature", -1, "at least 0.0"),
        ("top_k", 2.5, "Expected `int`, got `float`"),
        ("top_k", -2, "at least -1"),
        ("top_p", 1.5, "at most 1.0, got 1.5"),
        ("top_p", [0.9], "got `array`"),
        ("repetition_penalty", 0, "must be"),
        ("presence_penalty", 1e7, "at most 1000000.0"),
        ("max_new_tokens", 0, "at least 1"),
        ("max_new_tokens", 10**30, "at most"),
    ],
)
def test_errors_name_the_field(name, value, message):
    with pytest.raises(InvalidParameter) as caught:
        SamplingDefaults.from_mapping({**QWEN, name: value})
    assert caught.value.field == name and message in caught.value.message

"""Sampling parameters: validation, and the names of other servers."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import numpy as np
import pytest

from neso.generation import InvalidParameter, SamplingDefaults, SamplingParams


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("beam_width", {"beam_width": 0}),
        ("n", {"beam_width": 2, "n": 3}),
        ("best_of", {"beam_width": 2, "best_of": 3}),
        ("best_of", {"n": 3, "best_of": 2}),
        ("length_penalty", {"length_penalty": float("nan")}),
        ("length_penalty", {"length_penalty": 1000.0}),
        ("top_p_decay", {"top_p_decay": 0.0}),
        ("top_p_min", {"top_p_min": 2.0}),
        ("no_repeat_ngram_size", {"no_repeat_ngram_size": -1}),
        ("bad_words", {"bad_words": ((),)}),
        ("bad_words", {"bad_words": ("",)}),
        ("stop_words", {"stop_words": ((),)}),
        ("stop", {"stop": ("",)}),
        ("stop", {"stop": ("a",) * 65}),
        ("stop", {"stop": ("a" * 257,)}),
        ("bad_words", {"bad_words": ((1,),) * 1025}),
        ("bad_words", {"bad_words": ("a", "a" * 257)}),
        ("stop_words", {"stop_words": ((1,),) * 1025}),
        ("stop_words", {"stop_words": ((1,) * 257,)}),
        ("allowed_token_ids", {"allowed_token_ids": ()}),
        ("logprobs", {"logprobs": -2}),
        ("logit_bias", {"logit_bias": {1: 1e300}}),
        ("logit_bias", {"logit_bias": {1: -1e31}}),
        ("logit_bias", {"logit_bias": {1: float("nan")}}),
        ("repetition_penalty", {"repetition_penalty": 1e-300}),
        ("repetition_penalty", {"repetition_penalty": 1e300}),
        ("beam_search_diversity_rate", {"beam_search_diversity_rate": 1e300}),
        ("prompt_logprobs", {"prompt_logprobs": -1}),
        ("early_stopping", {"early_stopping": 1}),
        ("top_k", {"top_k": 2**31}),
        ("top_p_reset_ids", {"top_p_reset_ids": 10**30}),
        ("no_repeat_ngram_size", {"no_repeat_ngram_size": 10**30}),
        ("max_tokens", {"max_tokens": 10**30}),
        ("min_tokens", {"min_tokens": 10**30}),
        ("logit_bias", {"logit_bias": {1: 1e300}}),
        ("logit_bias", {"logit_bias": {1: float("nan")}}),
        ("repetition_penalty", {"repetition_penalty": 1e-300}),
        ("repetition_penalty", {"repetition_penalty": 1e300}),
        ("stop", {"stop": ("\ud800",)}),
        ("stop_token_ids", {"stop_token_ids": tuple(range(1025))}),
        ("stop_words", {"stop_words": ((1,),) * 1025}),
        ("stop_token_ids", {"stop_token_ids": tuple(range(1000)), "beam_width": 64}),
        ("stop_words", {"stop_words": ((1,),) * 1000, "beam_width": 64}),
    ],
)
def test_invalid_values_name_their_field(field, values):
    with pytest.raises(InvalidParameter) as caught:
        SamplingParams(**values)
    assert caught.value.field == field


def test_aliases_of_other_servers():
    params = SamplingParams.from_mapping(
        {
            "len_penalty": "0.5",
            "min_length": 2,
            "runtime_top_k": 4,
            "runtime_top_p": 0.5,
            "runtime_top_p_decay": 0.9,
            "runtime_top_p_min": 0.1,
            "runtime_top_p_reset_ids": 7,
            "random_seed": 3,
            "num_return_sequences": 2,
            "bad_words": "no",
            "embedding_bias": [0.5, -1.0],
            "stop_words": None,
            "seed": None,
        }
    )
    assert (params.length_penalty, params.min_tokens, params.top_k, params.n) == (0.5, 2, 4, 2)
    assert (params.top_p, params.top_p_decay, params.top_p_min, params.top_p_reset_ids) == (0.5, 0.9, 0.1, 7)
    assert params.bad_words == ("no",) and params.stop_words == ()
    assert np.frombuffer(params.embedding_bias, np.float32).tolist() == [0.5, -1.0]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (True, True),
        (0, False),
        ("1", True),
        (2, "never"),
        ("never", "never"),
        ("False", False),
        (-1, "never"),
    ],
)
def test_early_stopping_values(given, expected):
    assert (
        SamplingParams.from_mapping({"early_stopping": given}).early_stopping is expected
        or expected == "never"
    )
    assert SamplingParams.from_mapping({"early_stopping": given}).early_stopping == expected


@pytest.mark.parametrize(
    "values",
    [{"early_stopping": "sometimes"}, {"embedding_bias": "x"}, {"bad_words": [[1.5]]}, {"nonsense": 1}],
)
def test_unconvertible_values_name_their_field(values):
    with pytest.raises(InvalidParameter) as caught:
        SamplingParams.from_mapping(values)
    assert caught.value.field == next(iter(values))


def test_beam_search_rejects_guided_decoding():
    with pytest.raises(InvalidParameter) as caught:
        SamplingParams.from_mapping({"beam_width": 2, "guided_regex": "a+"})
    assert caught.value.field == "beam_width"


def test_serialization_round_trip():
    params = SamplingParams(
        beam_width=4,
        early_stopping="never",
        bad_words=("a", (1, 2)),
        stop_words=((3,), (4, 5)),
        embedding_bias=np.ones(3, np.float32).tobytes(),
        allowed_token_ids=(1,),
    )
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params


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
    ("limits", "requested", "gets"),
    [(False, None, 8), (False, 100, 100), (True, None, 8), (True, 100, 8), (True, 3, 3), (True, 0, 0)],
)
def test_max_tokens_of_a_request(limits, requested, gets):
    defaults = SamplingDefaults.from_mapping({"max_new_tokens": 8}, limits_tokens=limits)
    assert defaults.max_tokens(requested) == gets
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

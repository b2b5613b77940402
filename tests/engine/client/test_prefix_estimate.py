"""Estimate of an engine's prefix cache."""

from __future__ import annotations

from neso.engine.client.prefix_estimate import PrefixEstimate, PrefixKeys
from neso.engine.core.request import EngineRequest, PromptImage
from neso.generation import LoraRequest, SamplingParams


def keys(tokens: list[int], **fields: object) -> list[int]:
    return of(tokens, **fields).keys


def of(tokens: list[int], **fields: object) -> PrefixKeys:
    request = EngineRequest(
        request_id="a", prompt_token_ids=tokens, sampling=SamplingParams(), max_tokens=1, **fields
    )  # type: ignore[arg-type]
    return PrefixKeys(request, 4)


def test_full_blocks_have_keys():
    assert len(keys(list(range(11)))) == 2
    assert keys(list(range(11)))[:2] == keys(list(range(8)))
    assert keys([9, *range(1, 8)])[1] != keys(list(range(8)))[1], "a key covers all tokens before its block"


def test_extended_keys_equal_those_of_the_whole():
    extended = of(list(range(6)))
    for token in range(6, 15):
        extended.extend([token])
    assert extended.keys == keys(list(range(15)))


def test_content_beside_tokens_separates_prefixes():
    tokens = list(range(8))
    variants = [
        keys(tokens),
        keys(tokens, cache_identity=("salt",)),
        keys(tokens, lora=LoraRequest(name="a")),
        keys(tokens, images=[PromptImage(b"0", b"pixels", (1, 2, 1))]),
        keys(tokens, images=[PromptImage(b"0", b"others", (1, 2, 1))]),
    ]
    assert len({tuple(variant) for variant in variants}) == len(variants)


def test_match_counts_first_blocks():
    estimate = PrefixEstimate(8)
    estimate.add(keys(list(range(12))))
    assert estimate.match(keys(list(range(16)))) == 3
    assert estimate.match(keys([*range(8), 0, 0, 0, 0])) == 2
    assert estimate.match(keys([5, 6, 7, 8])) == 0
    estimate.clear()
    assert estimate.match(keys(list(range(12)))) == 0


def test_ends_of_the_oldest_prefixes_are_forgotten_first():
    estimate = PrefixEstimate(4)
    old, new = keys(list(range(12))), keys(list(range(50, 58)))
    estimate.add(old)
    estimate.add(new)
    assert len(estimate) == 4
    assert (estimate.match(old), estimate.match(new)) == (2, 2)

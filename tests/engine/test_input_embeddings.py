"""Prompt embeddings, compared with transformers' generate with inputs_embeds."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from checkpoints import VOCAB_SIZE, load_oracle

from neso.engine.addons.input_embeddings import EmbeddingInputs
from neso.engine.client.llm import LLM
from neso.engine.core.request import EngineRequest, InputEmbeddings
from neso.engine.core.sequence import Sequence
from neso.generation import InvalidParameter, SamplingParams

RUNNERS = ["reference", "native", "torch"]
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
SCHEDULES = {
    "whole": {},
    "one by one": {"max_prefill_chunk": 1},
    "chunks of 7, no prefix cache": {"max_prefill_chunk": 7, "enable_prefix_caching": False},
    "preempted": {"num_blocks": 16, "block_size": 4, "max_prefill_chunk": 5},
}


@pytest.fixture(scope="module")
def oracle(llama_checkpoint):
    return load_oracle(llama_checkpoint)


def continued(oracle, vectors: np.ndarray, max_tokens: int = 8) -> list[int]:
    """Return transformers' greedy tokens after the rows float32[P, hidden]."""
    with torch.no_grad():
        output = oracle.generate(
            inputs_embeds=torch.tensor(vectors)[None],
            attention_mask=torch.ones(1, len(vectors), dtype=torch.long),
            max_new_tokens=max_tokens,
            do_sample=False,
            eos_token_id=-1,
            pad_token_id=2,
        )
    return output[0].tolist()


def embedded(oracle, ids: list[int]) -> np.ndarray:
    return oracle.get_input_embeddings().weight.detach().numpy()[ids]


def random_rows(count: int, width: int = 48, seed: int = 0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal((count, width)) * 0.3).astype(np.float32)


@pytest.mark.parametrize("options", SCHEDULES.values(), ids=SCHEDULES)
@pytest.mark.parametrize("runner", RUNNERS)
def test_prompt_embeddings_equal_transformers(llama_checkpoint, oracle, runner, options):
    llm = LLM(llama_checkpoint, runner=runner, **options)
    prompts = [random_rows(n, seed=n) for n in (1, 9, 21, 30)]
    results = llm.generate([*prompts, list(range(10, 30))], GREEDY, progress=False)
    expected = [continued(oracle, rows) for rows in [*prompts, embedded(oracle, list(range(10, 30)))]]
    assert [r.outputs[0].token_ids for r in results] == expected
    if "num_blocks" in options:
        assert llm.core.stats().preemptions
    llm.core.check_integrity()


@pytest.mark.parametrize("options", SCHEDULES.values(), ids=SCHEDULES)
@pytest.mark.parametrize("runner", RUNNERS)
def test_virtual_tokens_are_rows_of_the_table(llama_checkpoint, oracle, runner, options):
    llm = LLM(llama_checkpoint, runner=runner, **options)
    table = random_rows(6)
    # Rows at the start, in the middle, and one twice; the placeholder also occurs as a normal token.
    ids = [VOCAB_SIZE + 1, VOCAB_SIZE, *range(6, 20), VOCAB_SIZE + 5, 0, VOCAB_SIZE + 5, 40, 41]
    prompt = {"prompt": ids, "prompt_embedding_table": table, "prompt_vocab_size": 6}
    everything = np.concatenate([embedded(oracle, list(range(VOCAB_SIZE))), table])
    expected = continued(oracle, everything[ids])
    first, second = llm.generate([prompt, ids[2:16]], GREEDY, progress=False)
    assert first.outputs[0].token_ids == expected
    assert second.outputs[0].token_ids == continued(oracle, everything[ids[2:16]])


def test_a_text_prompt_follows_the_whole_table(llama_checkpoint, oracle):
    llm = LLM(llama_checkpoint, runner="reference")
    table = random_rows(3)
    (result,) = llm.generate({"prompt": "The quick", "prompt_embedding_table": table}, GREEDY, progress=False)
    rows = np.concatenate([table, embedded(oracle, llm.tokenizer.encode("The quick"))])
    assert result.outputs[0].token_ids == continued(oracle, rows)


def test_prefix_cache_compares_rows_by_content(llama_checkpoint, oracle):
    llm = LLM(llama_checkpoint, runner="reference", block_size=4)
    one, other = random_rows(13, seed=1), random_rows(13, seed=2)
    # The placeholder ids themselves: their blocks must not match the blocks of the rows.
    plain = [0] * 13
    for _ in range(2):
        for rows in (one, other):
            (result,) = llm.generate(rows, GREEDY, progress=False)
            assert result.outputs[0].token_ids == continued(oracle, rows)
        (result,) = llm.generate(plain, GREEDY, progress=False)
        assert result.outputs[0].token_ids == continued(oracle, embedded(oracle, plain))
    # The second round hits three full blocks of each prompt.
    assert llm.core.stats().prefix_hit_tokens == 3 * 12
    half = np.concatenate([one[:8], other[8:]])
    (result,) = llm.generate(half, GREEDY, progress=False)
    assert result.outputs[0].token_ids == continued(oracle, half)
    assert llm.core.stats().prefix_hit_tokens == 3 * 12 + 8


def test_sequences_of_a_request_share_the_rows(llama_checkpoint, oracle):
    llm = LLM(llama_checkpoint, runner="native", num_blocks=24, block_size=4)
    rows = random_rows(9)
    params = SamplingParams(n=3, temperature=0, max_tokens=8, ignore_eos=True)
    (result,) = llm.generate(rows, params, progress=False)
    assert [o.token_ids for o in result.outputs] == [continued(oracle, rows)] * 3


def test_placeholders_are_not_penalized(llama_checkpoint):
    embeddings = InputEmbeddings.of(np.array([1, 3], np.int32), random_rows(2))
    request = EngineRequest(
        request_id="a",
        prompt_token_ids=[7, 0, 8, 0, 0],
        sampling=SamplingParams(),
        max_tokens=1,
        input_embeddings=embeddings,
    )
    sequence = Sequence(id=1, request=request, arrival=1)
    EmbeddingInputs().admit(sequence)
    assert sequence.text_token_ids == [7, 8, 0]


@pytest.mark.parametrize(
    "field, prompt",
    [
        ("prompt_embeds", random_rows(3, width=47)),
        ("prompt_embeds", np.zeros((2, 48), np.int32)),
        ("prompt_embeds", np.full((2, 48), np.nan)),
        ("prompt_embeds", {"prompt": "x", "prompt_embeds": random_rows(2)}),
        ("prompt_embedding_table", {"prompt": "x", "prompt_embedding_table": random_rows(0)}),
        (
            "prompt_vocab_size",
            {"prompt": [9], "prompt_embedding_table": random_rows(2), "prompt_vocab_size": 3},
        ),
        ("prompt", {"prompt": [VOCAB_SIZE + 2], "prompt_embedding_table": random_rows(2)}),
        ("prompt", {"prompt": [-1], "prompt_embedding_table": random_rows(2)}),
        ("prompt", [VOCAB_SIZE]),
        ("promt", {"promt": "x"}),
    ],
)
def test_invalid_embeddings_name_their_field(llama_checkpoint, field, prompt):
    llm = LLM(llama_checkpoint, runner="reference", num_blocks=16)
    with pytest.raises(InvalidParameter) as caught:
        llm.generate(prompt, GREEDY, progress=False)
    assert caught.value.field == field


def test_runners_without_embeddings_reject_them(llama_checkpoint):
    llm = LLM(llama_checkpoint, runner="transformers", num_blocks=16)
    with pytest.raises(InvalidParameter, match="token ids only"):
        llm.generate(random_rows(3), GREEDY, progress=False)
    with pytest.raises(InvalidParameter, match="not available for a prompt with embeddings"):
        LLM(llama_checkpoint, runner="reference", num_blocks=16).generate(
            random_rows(3), SamplingParams(prompt_logprobs=1), progress=False
        )

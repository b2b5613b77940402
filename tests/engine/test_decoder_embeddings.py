"""Embeddings from a decoder's hidden states, compared with transformers."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from checkpoints import VOCAB_SIZE, make_checkpoint
from transformers import AutoModel

from neso.engine.client.llm import LLM
from neso.generation import InvalidParameter, PoolingParams, SamplingParams

SCHEDULES = {
    "whole": {},
    "one by one": {"max_prefill_chunk": 1},
    "chunks of 7, no prefix cache": {"max_prefill_chunk": 7, "enable_prefix_caching": False},
    "preempted": {"num_blocks": 12, "block_size": 4, "max_prefill_chunk": 5, "max_num_batched_tokens": 64},
}
ATOL = 1e-4
PROMPTS = [np.random.default_rng(n).integers(6, VOCAB_SIZE, n).tolist() for n in (1, 9, 21, 30)]


@pytest.fixture(scope="module")
def hidden_states(llama_checkpoint):
    model = AutoModel.from_pretrained(llama_checkpoint, dtype=torch.float32).eval()

    def states(ids: list[int]) -> np.ndarray:
        with torch.no_grad():
            return model(torch.tensor([ids])).last_hidden_state[0].numpy()

    return states


def pooled(hidden: np.ndarray, kind: str) -> np.ndarray:
    return {"mean": hidden.mean(0), "last": hidden[-1], "cls": hidden[0], "max": hidden.max(0)}[kind]


@pytest.mark.pairwise
@pytest.mark.parametrize("kind", ["last", "mean", "cls", "max"])
@pytest.mark.parametrize("options", SCHEDULES.values(), ids=SCHEDULES)
@pytest.mark.parametrize("runner", ["reference", "native", "torch"])
def test_hidden_states_are_pooled(llama_checkpoint, hidden_states, runner, options, kind):
    llm = LLM(llama_checkpoint, runner=runner, **options)
    # The second time prefixes are cached, but pooled positions must not be skipped.
    for _ in range(2):
        embeddings = llm.embed(PROMPTS, PoolingParams(pooling=kind, normalize=False))
        expected = [pooled(hidden_states(ids), kind) for ids in PROMPTS]
        np.testing.assert_allclose(embeddings, expected, atol=ATOL)
    llm.core.check_integrity()
    assert not llm.core.has_work


def test_generation_and_pooling_in_one_engine(llama_checkpoint, hidden_states):
    llm = LLM(llama_checkpoint, runner="native", max_prefill_chunk=4)
    greedy = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    alone = llm.generate(PROMPTS[2], greedy, progress=False)[0].text
    stream = llm.stream(PROMPTS[2], greedy)
    pieces = [next(stream)]
    (embedding,) = llm.embed(PROMPTS[3], PoolingParams(pooling="mean"))
    expected = hidden_states(PROMPTS[3]).mean(0)
    np.testing.assert_allclose(embedding, expected / np.linalg.norm(expected), atol=ATOL)
    pieces += list(stream)
    assert "".join(d.text for piece in pieces for d in piece.deltas) == alone
    assert llm.info.pooling.kind == "last" and llm.info.generates


def test_a_checkpoint_without_an_lm_head(tmp_path, llama_checkpoint, hidden_states):
    directory = make_checkpoint(tmp_path / "whole", "mistral")
    model = AutoModel.from_pretrained(directory, dtype=torch.float32).eval()
    model.save_pretrained(tmp_path / "bare")
    config = json.loads((tmp_path / "bare" / "config.json").read_text())
    assert config["architectures"] == ["MistralModel"]
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "bare" / name).write_bytes((directory / name).read_bytes())
    llm = LLM(tmp_path / "bare", runner="native")
    with torch.no_grad():
        expected = model(torch.tensor([PROMPTS[2]])).last_hidden_state[0, -1].numpy()
    np.testing.assert_allclose(llm.embed(PROMPTS[2], PoolingParams(normalize=False))[0], expected, atol=ATOL)
    with pytest.raises(InvalidParameter, match="no LM head"):
        llm.generate("x", progress=False)


def test_unsupported_pooling_is_rejected(llama_checkpoint):
    llm = LLM(llama_checkpoint, runner="transformers", num_blocks=16)
    with pytest.raises(InvalidParameter, match="does not support embeddings"):
        llm.embed("x")
    llm = LLM(llama_checkpoint, runner="reference", max_model_len=20)
    with pytest.raises(InvalidParameter, match="at most 19"):
        llm.embed(list(range(10, 30)))
    with pytest.raises(InvalidParameter, match="classifier"):
        llm.classify("x")


def test_generation_and_pooling_share_cached_prefixes(llama_checkpoint, hidden_states):
    llm = LLM(llama_checkpoint, runner="reference", block_size=4)
    llm.generate(PROMPTS[3], SamplingParams(temperature=0, max_tokens=2), progress=False)
    embedding = llm.embed(PROMPTS[3], PoolingParams(pooling="last", normalize=False))[0]
    np.testing.assert_allclose(embedding, hidden_states(PROMPTS[3])[-1], atol=ATOL)
    assert llm.core.stats().prefix_hit_tokens == 28

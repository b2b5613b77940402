"""Medusa heads: random ones change no token, fitted ones save steps."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from medusa_files import HIDDEN, NUM_HEADS, VOCAB, head_tensors, write_heads
from oracle import greedy

from neso.engine.client.llm import LLM
from neso.engine.core.step_plan import StepPlan
from neso.engine.errors import EngineError
from neso.engine.runners.base import CacheLayout
from neso.engine.runners.registry import runner_class
from neso.engine.spec_decode.config import MC_SIM_7B_63, paths_of
from neso.engine.spec_decode.draft import MAX_TREE_NODES
from neso.engine.spec_decode.medusa import MedusaHeads, tree_of
from neso.engine.specs.registry import decoder_spec
from neso.engine.weights.checkpoint import Checkpoint
from neso.engine.weights.source import CheckpointError
from neso.generation import SamplingParams

MAX_TOKENS = 30
PROMPTS = [[7, 8, 9, 40, 41], [100], [5 + i for i in range(33)]]
GREEDY = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)


def hidden_states(checkpoint: Path, tokens: list[int]) -> np.ndarray:
    """Return the hidden states of all tokens, from the reference runner."""
    with Checkpoint(checkpoint) as source:
        runner = runner_class("reference").load(decoder_spec(source.config), source)
    count = len(tokens)
    runner.allocate_cache(CacheLayout(1, count))
    runner.step(
        StepPlan(
            step=1,
            sequence_ids=np.array([1], np.int32),
            token_ids=np.array(tokens, np.int32),
            query_start=np.array([0, count], np.int32),
            num_computed=np.zeros(1, np.int32),
            block_tables=np.zeros((1, 1), np.int32),
            block_copies=np.zeros((0, 2), np.int32),
            logits_rows=np.arange(count, dtype=np.int32),
        )
    )
    return runner.row_states(list(range(count)))


@pytest.fixture(scope="module")
def expected(llama_checkpoint):
    return greedy(llama_checkpoint, PROMPTS, MAX_TOKENS)


@pytest.fixture(scope="module")
def random_heads(tmp_path_factory):
    outputs = list(np.random.default_rng(0).normal(size=(NUM_HEADS, VOCAB, HIDDEN)))
    return write_heads(
        tmp_path_factory.mktemp("medusa") / "random", head_tensors(outputs, scale=0.3, blocks=2)
    )


@pytest.fixture(scope="module")
def fitted_heads(llama_checkpoint, expected, tmp_path_factory):
    """Heads fitted to predict the output after the first prompt, each at its distance."""
    text = [*PROMPTS[0], *expected[0]]
    hidden = hidden_states(llama_checkpoint, text)
    outputs = []
    for ahead in range(2, 2 + NUM_HEADS):
        requested = np.eye(VOCAB)[text[ahead:]]
        solution, *_ = np.linalg.lstsq(hidden[: len(requested)].astype(np.float64), requested, rcond=None)
        outputs.append(solution.T)
    return write_heads(tmp_path_factory.mktemp("medusa") / "fitted", head_tensors(outputs, "medusa_head."))


def load(checkpoint: Path, heads: Path, **options) -> LLM:
    common = {"runner": "reference", "dtype": "float32", "adaptive_speculation": False, "num_blocks": 128}
    return LLM(checkpoint, speculative="medusa", speculative_model=str(heads), **{**common, **options})


@pytest.mark.parametrize("runner", ["reference", "native", "torch"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"medusa_choices": [[0], [1], [2], [0, 0], [1, 3]]},
        {"num_blocks": 34, "block_size": 4, "max_prefill_chunk": 7},
        {"max_num_batched_tokens": 20, "max_num_seqs": 3},
    ],
)
def test_random_heads_change_no_token(llama_checkpoint, expected, random_heads, runner, options):
    llm = load(llama_checkpoint, random_heads, runner=runner, **options)
    found = llm.generate(PROMPTS, GREEDY, progress=False)
    assert [result.outputs[0].token_ids for result in found] == expected
    assert llm.core.stats().drafts.drafts
    llm.core.check_integrity()
    assert llm.core.scheduler.kv.pool.num_used == 0


@pytest.mark.parametrize("runner", ["reference", "native", "torch"])
def test_fitted_heads_save_steps(llama_checkpoint, expected, fitted_heads, runner):
    llm = load(llama_checkpoint, fitted_heads, runner=runner, block_size=4, num_blocks=200)
    found = llm.generate(PROMPTS, GREEDY, progress=False)
    assert [result.outputs[0].token_ids for result in found] == expected
    llm = load(llama_checkpoint, fitted_heads, runner=runner)
    (found,) = llm.generate(PROMPTS[:1], GREEDY, progress=False)
    assert found.outputs[0].token_ids == expected[0]
    # Five tokens per step, except for the first and the end, to which the heads were not fitted.
    assert llm.core.stats().step <= 2 + MAX_TOKENS // (1 + NUM_HEADS)
    assert llm.core.stats().drafts.accepted_at[NUM_HEADS - 1] >= 4


def test_moved_keys_are_valid_in_the_prefix_cache(llama_checkpoint, expected, fitted_heads):
    llm = load(llama_checkpoint, fitted_heads, block_size=4)
    # Choices in reverse order: accepted tokens have to be moved to their slots.
    llm = load(
        llama_checkpoint, fitted_heads, block_size=4, medusa_choices=[[3], [2], [1], [0], [0, 1], [0, 0]]
    )
    llm.generate(PROMPTS[:1], GREEDY, progress=False)
    again = [*PROMPTS[0], *expected[0][:20]]
    (found,) = llm.generate(
        [again], SamplingParams(temperature=0, max_tokens=8, ignore_eos=True), progress=False
    )
    assert found.outputs[0].token_ids == expected[0][20:28]
    assert llm.core.stats().prefix_hit_tokens >= 20


def test_seeded_tokens_are_unchanged(llama_checkpoint, fitted_heads):
    params = SamplingParams(temperature=0.5, seed=4, max_tokens=MAX_TOKENS, frequency_penalty=0.3, n=2)
    plain = LLM(llama_checkpoint, runner="reference").generate(PROMPTS, params, progress=False)
    found = load(llama_checkpoint, fitted_heads).generate(PROMPTS, params, progress=False)
    for mine, theirs in zip(found, plain, strict=True):
        assert [o.token_ids for o in mine.outputs] == [o.token_ids for o in theirs.outputs]


def test_heads_in_the_checkpoint(llama_checkpoint, expected, fitted_heads, tmp_path):
    model = tmp_path / "model"
    shutil.copytree(llama_checkpoint, model)
    shutil.copy(fitted_heads / "medusa_lm_head.safetensors", model)
    llm = LLM(model, runner="reference", speculative="medusa", adaptive_speculation=False)
    (found,) = llm.generate(PROMPTS[:1], GREEDY, progress=False)
    assert found.outputs[0].token_ids == expected[0]
    assert llm.core.stats().drafts.accepted_tokens > 10


def test_missing_or_wrong_heads(llama_checkpoint, tmp_path, fitted_heads):
    with pytest.raises(EngineError, match="no tensors medusa_head"):
        LLM(llama_checkpoint, runner="reference", speculative="medusa")
    with pytest.raises(EngineError, match="5 tokens deep, there are 4 heads"):
        load(llama_checkpoint, fitted_heads, medusa_choices=[[0] * depth for depth in range(1, 6)])
    wrong = write_heads(tmp_path / "wrong", head_tensors([np.zeros((VOCAB + 1, HIDDEN))]))
    with pytest.raises(CheckpointError, match=r"head 0 needs a tensor 1\.weight of the shape \[384, 48\]"):
        MedusaHeads.load(wrong, HIDDEN, VOCAB)


def test_tree_from_choices():
    assert len(MC_SIM_7B_63) == MAX_TREE_NODES
    paths = paths_of(MC_SIM_7B_63)
    tree = tree_of(paths)
    assert [len(path) for path in paths] == list(tree.depths)
    for path, parent in zip(paths, tree.parents, strict=True):
        assert path[:-1] == (paths[parent] if parent >= 0 else ())


@given(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4), min_size=1, max_size=8))
def test_choices_with_missing_parents_are_rejected(choices):
    complete = {()} | {tuple(path) for path in choices}
    if all(path[:-1] in complete for path in complete if path):
        assert len(tree_of(paths_of(choices)).parents) == len(complete) - 1
    else:
        with pytest.raises(ValueError, match="which is missing"):
            paths_of(choices)

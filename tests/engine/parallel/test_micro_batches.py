"""Micro-batches of pipeline stages: every token once, and the results of the whole step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from parallel.test_family_ranks import load
from parallel.thread_ranks import ThreadRanks
from runners.plan_builder import PlanBuilder, random_tokens, run

import neso.engine.parallel.micro_batches as module
from neso.engine.core.step_plan import StepPlan
from neso.engine.lora.adapter import LoraPlan
from neso.engine.parallel.micro_batches import MAX_PER_STAGE, MIN_TOKENS, micro_batches
from neso.engine.pooling.pooler import PoolingPlan


def make_plan(lengths: list[int], sampled: list[bool], computed: list[int]) -> StepPlan:
    """A step of sequences with these numbers of new tokens; those that are sampled have a row for the last token."""
    builder = PlanBuilder(num_blocks=4096)
    sequences = [builder.sequence(random_tokens(sum(pair))) for pair in zip(computed, lengths, strict=True)]
    for sequence, count in zip(sequences, computed, strict=True):
        if count:
            builder.plan([(sequence, count)])
    ends = np.cumsum(lengths)
    rows = [int(end) - 1 for end, wanted in zip(ends, sampled, strict=True) if wanted]
    plan = builder.plan(list(zip(sequences, lengths, strict=True)), copies=[(1, 2)], rows=rows)
    return plan.with_part(LoraPlan(np.arange(len(lengths), dtype=np.int32)))


@given(
    st.lists(
        st.tuples(st.sampled_from([1, 1, 1, 5, 64, 200, 512]), st.booleans(), st.integers(0, 9)),
        min_size=1,
        max_size=8,
    ),
    st.integers(1, 4),
)
def test_every_token_is_in_one_micro_batch(sequences: list[tuple[int, bool, int]], stages: int) -> None:
    lengths, sampled, computed = (list(column) for column in zip(*sequences, strict=True))
    plan = make_plan(lengths, sampled, computed)
    batches = micro_batches(plan, stages)
    assert len(batches) <= MAX_PER_STAGE * stages and (stages > 1 or len(batches) == 1)
    if len(batches) > 1:
        assert min(batch.num_tokens for batch in batches[:-1]) >= MIN_TOKENS
    assert [len(batch.block_copies) for batch in batches] == [1] + [0] * (len(batches) - 1)
    assert not any(len(batch.logits_rows) for batch in batches[:-1])
    done = dict(zip(plan.sequence_ids.tolist(), plan.num_computed.tolist(), strict=True))
    found: dict[int, list[int]] = {number: [] for number in done}
    for batch in batches:
        lora = batch.part(LoraPlan)
        assert lora is not None
        for row, number in enumerate(batch.sequence_ids.tolist()):
            whole = plan.sequence_ids.tolist().index(number)
            tokens = batch.token_ids[batch.query_start[row] : batch.query_start[row + 1]].tolist()
            assert tokens and batch.num_computed[row] == done[number]
            assert lora.slots[row] == whole
            np.testing.assert_array_equal(batch.block_tables[row], plan.block_tables[whole])
            done[number] += len(tokens)
            found[number] += tokens
        assert {array.dtype for array in (batch.query_start, batch.num_computed, batch.logits_rows)} == {
            np.dtype(np.int32)
        }
    starts = plan.query_start.tolist()
    for row, number in enumerate(plan.sequence_ids.tolist()):
        assert found[number] == plan.token_ids[starts[row] : starts[row + 1]].tolist()
    last = batches[-1]
    np.testing.assert_array_equal(last.token_ids[last.logits_rows], plan.token_ids[plan.logits_rows])


def test_prompt_is_split_evenly_and_decodes_are_in_the_last() -> None:
    plan = make_plan([1, 400, 1], [True, True, True], [3, 0, 5])
    sizes = [batch.num_tokens for batch in micro_batches(plan, 2)]
    assert sizes == [67, 67, 67, 67, 67, 67]
    assert micro_batches(plan, 2)[-1].sequence_ids.tolist() == [1, 2, 3]


def test_steps_with_other_inputs_or_rows_for_all_tokens_are_not_split() -> None:
    plan = make_plan([400], [True], [0])
    assert len(micro_batches(plan.with_part(PoolingPlan(np.array([399], np.int32))), 2)) == 1
    assert len(micro_batches(replace(plan, logits_rows=np.arange(400, dtype=np.int32)), 2)) == 1


@pytest.mark.parametrize("runner", ["reference", "native", "torch"])
def test_results_equal_those_of_the_whole_step(
    checkpoint_factory: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, runner: str
) -> None:
    """Two prompts and a decode with a forked sequence, in micro-batches of 4 tokens on 2 stages."""
    monkeypatch.setattr(module, "MIN_TOKENS", 4)
    found = []
    for stages in (1, 2):
        ranks: ThreadRanks = load(checkpoint_factory("llama"), runner, 1, 2)
        builder = PlanBuilder()
        ranks.allocate_cache(builder.layout)
        first, second = builder.sequence(random_tokens(40)), builder.sequence(random_tokens(31, seed=1))
        run(ranks, builder.plan([(first, 6)]))
        third, copies = builder.fork(first, random_tokens(9, seed=2))
        plan = builder.plan([(first, 30), (third, 1), (second, 31)], copies, rows=[29, 30, 61])
        *others, last = micro_batches(plan, stages)
        assert len(others) == (7 if stages == 2 else 0)
        for each in others:
            assert not len(run(ranks, each))
        found += [run(ranks, last), run(ranks, builder.plan([(first, 1)]))]
    for whole, split in zip(found[:2], found[2:], strict=True):
        np.testing.assert_allclose(split, whole, atol=2e-4)

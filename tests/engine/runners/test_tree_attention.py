"""Tree attention: each token has the logits of its own path, and moved cache slots keep their content."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from plan_builder import PlanBuilder, random_tokens, run, run_in_chunks

from neso.engine.core.step_plan import StepPlan
from neso.engine.runners.base import SpecRunner
from neso.engine.runners.registry import runner_class
from neso.engine.runners.runner_options import RunnerOptions
from neso.engine.runners.torch.triton_operations import TritonOperations
from neso.engine.spec_decode.draft import NO_SLOT_COPIES, NO_TREE, DraftTree, DraftTreePlan
from neso.engine.specs.registry import decoder_spec
from neso.engine.weights.checkpoint import Checkpoint

# Branches at every depth, and a chain of 6 that exceeds a small window.
TREE = DraftTree((-1, -1, 0, 0, 1, 2, 2, 5, 7, 8))
CASES = {"full": ("llama", {}), "window": ("mistral", {"sliding_window": 4}), "learned": ("gpt2", {})}


def load(name: str, case: str, checkpoint_factory) -> SpecRunner:
    arch, overrides = CASES[case]
    with Checkpoint(checkpoint_factory(arch, **overrides)) as checkpoint:
        spec = decoder_spec(checkpoint.config)
        return runner_class(name).load(spec, checkpoint, RunnerOptions(dtype="float32"))


@pytest.fixture(params=CASES)
def case(request):
    return request.param


@pytest.fixture(params=["reference", "native", "torch"])
def runner(request, case, checkpoint_factory):
    return load(request.param, case, checkpoint_factory)


def with_tree(plan: StepPlan, sequence: int, tree: DraftTree) -> StepPlan:
    """Return the plan with the new tokens of a sequence as a tree below the first of them."""
    depths = np.arange(plan.num_tokens) - np.repeat(plan.query_start[:-1], np.diff(plan.query_start))
    masks = np.zeros(plan.num_tokens, np.uint64)
    begin, end = plan.query_start[sequence : sequence + 2]
    depths[begin:end] = (0, *tree.depths)
    masks[begin:end] = (1, *tree.masks)
    return plan.with_part(DraftTreePlan(NO_SLOT_COPIES, masks, depths.astype(np.int32)))


def path_to(tree: DraftTree, node: int) -> list[int]:
    return [] if node < 0 else [*path_to(tree, tree.parents[node]), node]


@pytest.mark.parametrize("context", [1, 7, 40])
def test_each_node_attends_to_its_path(runner, context):
    check_nodes(runner, context)


@pytest.mark.parametrize("name", ["reference", "native", "torch"])
def test_end_of_the_context(checkpoint_factory, name):
    """Slots of nodes lie beyond the 512 learned positions, positions of nodes do not."""
    check_nodes(load(name, "learned", checkpoint_factory), 505)


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="the GPU's tests compile the kernels")
def test_each_node_attends_to_its_path_in_triton(case, checkpoint_factory):
    """Interpreted kernels: slow."""
    runner = load("torch", case, checkpoint_factory)
    runner._decoder = dataclasses.replace(runner._decoder, operations=TritonOperations())
    check_nodes(runner, 3, DraftTree((-1, -1, 0, 1, 3)))


def check_nodes(runner: SpecRunner, context: int, tree: DraftTree = TREE) -> None:
    builder = PlanBuilder(block_size=4, num_blocks=2048)
    runner.allocate_cache(builder.layout)
    tokens = random_tokens(context + 1, seed=context)
    nodes = random_tokens(len(tree.parents), seed=99)
    sequence, other = builder.sequence([*tokens, *nodes]), builder.sequence(random_tokens(6, seed=5))
    run(runner, builder.plan([(sequence, context)]))
    # With another sequence that is not a tree.
    plan = with_tree(builder.plan([(other, 6), (sequence, 1 + len(nodes))]), 1, tree)
    found = run(runner, plan)
    for node in range(-1, len(nodes)):
        path = [nodes[i] for i in path_to(tree, node)]
        expected = run_in_chunks(runner, builder, [*tokens, *path], [context + 1 + len(path)])[-1]
        np.testing.assert_allclose(found[6 + 1 + node], expected, rtol=2e-4, atol=2e-4)
    expected = run_in_chunks(runner, builder, other.tokens, [6])
    np.testing.assert_allclose(found[:6], expected, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("context", [3, 7, 40])
def test_an_accepted_path_is_moved_to_its_slots(runner, context):
    builder = PlanBuilder(block_size=4)
    runner.allocate_cache(builder.layout)
    tokens = random_tokens(context + 1, seed=context)
    nodes = random_tokens(len(TREE.parents), seed=98)
    path = path_to(TREE, 8)
    text = [*tokens, *(nodes[i] for i in path), 77]
    sequence = builder.sequence([*tokens, *nodes])
    run(runner, builder.plan([(sequence, context)]))
    run(runner, with_tree(builder.plan([(sequence, 1 + len(nodes))]), 0, TREE))
    known = context + 1
    sequence.tokens, sequence.num_computed = text, known + len(path)
    plan = builder.plan([(sequence, 1)])
    copies = [(0, known + node, known + place) for place, node in enumerate(path) if node != place]
    assert copies
    part = dataclasses.replace(NO_TREE, slot_copies=np.array(copies, np.int32))
    found = run(runner, plan.with_part(part))
    expected = run_in_chunks(runner, builder, text, [len(text)])[-1:]
    np.testing.assert_allclose(found, expected, rtol=2e-4, atol=2e-4)


def test_hidden_states_give_the_logits(runner, case, checkpoint_factory):
    builder = PlanBuilder(block_size=4)
    runner.allocate_cache(builder.layout)
    runner.keep_row_states()
    sequence = builder.sequence(random_tokens(9))
    logits = run(runner, builder.plan([(sequence, 9)], rows=[8, 2, 5]))
    hidden = runner.row_states([2, 0])
    arch, overrides = CASES[case]
    with Checkpoint(checkpoint_factory(arch, **overrides)) as checkpoint:
        name = "transformer.wte.weight" if arch == "gpt2" else "lm_head.weight"
        head = np.array(checkpoint.tensor(name), np.float32)
    np.testing.assert_allclose(hidden @ head.T, logits[[2, 0]], rtol=2e-4, atol=2e-4)

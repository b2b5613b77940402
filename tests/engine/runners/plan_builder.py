"""Step plans for tests: sequences with scattered blocks, advanced by any number of tokens at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from neso.engine.core.step_plan import StepPlan
from neso.engine.runners.base import CacheLayout, Runner


@dataclass
class Tracked:
    """A sequence with all its tokens known in advance."""

    sequence_id: int
    tokens: list[int]
    num_computed: int = 0
    blocks: list[int] = field(default_factory=list)


class PlanBuilder:
    """Allocates blocks to sequences in shuffled order and builds step plans."""

    def __init__(self, block_size: int = 4, num_blocks: int = 256, seed: int = 0) -> None:
        self.layout = CacheLayout(num_blocks, block_size)
        self._free = np.random.default_rng(seed).permutation(num_blocks).tolist()
        self._steps = 0
        self._sequences = 0

    def sequence(self, tokens: Sequence[int]) -> Tracked:
        self._sequences += 1
        return Tracked(self._sequences, list(tokens))

    def fork(self, parent: Tracked, tokens: Sequence[int]) -> tuple[Tracked, list[tuple[int, int]]]:
        """Fork a sequence that shares the parent's full blocks; returns the copy of its last block."""
        child = self.sequence(tokens)
        child.num_computed = parent.num_computed
        full = parent.num_computed // self.layout.block_size
        child.blocks = parent.blocks[:full]
        copies = []
        if parent.num_computed % self.layout.block_size:
            child.blocks.append(self._free.pop())
            copies.append((parent.blocks[full], child.blocks[full]))
        return child, copies

    def plan(
        self,
        advances: Sequence[tuple[Tracked, int]],
        copies: Sequence[tuple[int, int]] = (),
        rows: Sequence[int] | None = None,
    ) -> StepPlan:
        """Advance each sequence by a number of tokens, with logits for `rows`, by default all new tokens."""
        starts = np.cumsum([0, *(count for _, count in advances)])
        plan_rows = range(starts[-1]) if rows is None else rows
        tokens: list[int] = []
        computed = [sequence.num_computed for sequence, _ in advances]
        for sequence, count in advances:
            end = sequence.num_computed + count
            assert end <= len(sequence.tokens)
            tokens += sequence.tokens[sequence.num_computed : end]
            while len(sequence.blocks) * self.layout.block_size < end:
                sequence.blocks.append(self._free.pop())
            sequence.num_computed = end
        tables = np.full((len(advances), max(len(s.blocks) for s, _ in advances) + 2), -1, np.int32)
        for row, (sequence, _) in enumerate(advances):
            tables[row, : len(sequence.blocks)] = sequence.blocks
        self._steps += 1
        return StepPlan(
            step=self._steps,
            sequence_ids=np.array([s.sequence_id for s, _ in advances], np.int32),
            token_ids=np.array(tokens, np.int32),
            query_start=starts.astype(np.int32),
            num_computed=np.array(computed, np.int32),
            block_tables=tables,
            block_copies=np.array(copies, np.int32).reshape(-1, 2),
            logits_rows=np.array(plan_rows, np.int32),
        )


def run_in_chunks(
    runner: Runner, builder: PlanBuilder, tokens: Sequence[int], sizes: Sequence[int]
) -> np.ndarray:
    """Logits of all tokens of one sequence, computed in steps of these sizes: float32[len(tokens), vocab]."""
    sequence = builder.sequence(tokens)
    return np.concatenate([run(runner, builder.plan([(sequence, size)])) for size in sizes])


def mixed_batch(runner: Runner) -> np.ndarray:
    """Logits of chunked prompts next to decodes, computed with a new cache."""
    builder = PlanBuilder()
    runner.allocate_cache(builder.layout)
    first, second = builder.sequence(random_tokens(30)), builder.sequence(random_tokens(25, seed=1))
    plans = [[(first, 17)], [(first, 1), (second, 9)], [(first, 1), (second, 9)], [(first, 1), (second, 1)]]
    rows = [None, None, None, [1]]
    return np.concatenate(
        [run(runner, builder.plan(plan, rows=r)) for plan, r in zip(plans, rows, strict=True)]
    )


def run(runner: Runner, plan: StepPlan) -> np.ndarray:
    """The step's logits, float32[R, vocab], a copy on the host."""
    return np.array(runner.step(plan)[:])


def random_tokens(length: int, vocab_size: int = 384, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(6, vocab_size, length).tolist()


def oracle_logits(model: torch.nn.Module, tokens: Sequence[int]) -> np.ndarray:
    """transformers' logits for one sequence in one pass: float32[len(tokens), vocab]."""
    with torch.no_grad():
        return model(torch.tensor([list(tokens)])).logits[0].numpy()

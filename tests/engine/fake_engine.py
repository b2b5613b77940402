"""A runner without a model: tokens are a function of the preceding text, so every schedule can be checked."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from neso.engine.addons.registry import standard_addons
from neso.engine.core.attention_window import AttentionWindow
from neso.engine.core.request import EngineRequest
from neso.engine.core.scheduler_config import SchedulerConfig
from neso.engine.core.step_plan import StepPlan
from neso.engine.loop.engine_core import EngineCore
from neso.engine.runners.base import CacheLayout, Logits, Runner
from neso.engine.runners.shared_cache import CacheShape, SharedCache
from neso.engine.sampling.token_scores import TokenScores, sample_and_score
from neso.engine.spec_decode.draft import NO_TREE, DraftTreePlan, token_positions
from neso.engine.spec_decode.draft_length import DraftLength
from neso.engine.spec_decode.speculator import Proposer, SpeculativeDecoding
from neso.generation import SamplingParams

VOCAB = 97


def next_token(tokens: list[int]) -> int:
    """Return the fake model's next token; it depends on all `tokens` and their order."""
    state = 17
    for token in tokens:
        state = (state * 31 + token + 1) % 1_000_003
    return state % VOCAB


def visible(length: int, window: AttentionWindow | None) -> list[int]:
    """Return the positions that the last of `length` tokens attends to."""
    if window is None:
        return list(range(length))
    return [p for p in range(length) if p >= length - window.size or p < window.sinks]


class FakeRunner(Runner):
    """Stores the tokens themselves in the paged cache and reads them back as attention would."""

    vocab = VOCAB

    def __init__(self, window: AttentionWindow | None = None) -> None:
        self.window = window

    @classmethod
    def load(cls, spec, checkpoint):
        return cls()

    def allocate_cache(self, layout: CacheLayout) -> None:
        self.layout = layout
        if layout.shared:
            shape = CacheShape(1, layout.num_blocks, self.cache_bytes_per_block(layout.block_size))
            self.shared_cache = SharedCache.create(shape)
            self.cache = self.shared_cache.blocks.reshape(-1).view(np.int64)
            self.cache[:] = -1
        else:
            self.cache = np.full(layout.num_blocks * layout.block_size, -1, np.int64)
        self.host = np.full((layout.num_host_blocks, layout.block_size), -1, np.int64)

    def cache_bytes_per_block(self, block_size: int) -> int:
        return 8 * block_size

    def step(self, plan: StepPlan) -> Logits:
        size = self.layout.block_size
        blocks = self.cache.reshape(-1, size)
        for store, block, host_block in plan.block_transfers:
            if store:
                self.host[host_block] = blocks[block]
            else:
                blocks[block] = self.host[host_block]
        for source, target in plan.block_copies:
            blocks[target] = blocks[source]
        tree = plan.part(DraftTreePlan) or NO_TREE
        sources, targets = tree.copied_slots(plan, size)
        self.cache[targets] = self.cache[sources]
        slots = plan.slots(size)
        assert len(set(slots.tolist())) == len(slots), "two tokens written to one slot"
        self.cache[slots] = plan.token_ids
        positions = token_positions(plan)
        logits = np.zeros((len(plan.logits_rows), self.vocab), np.float32)
        for i, row in enumerate(plan.logits_rows):
            sequence = int(np.searchsorted(plan.query_start, row, side="right")) - 1
            computed, first = int(plan.num_computed[sequence]), int(plan.query_start[sequence])
            written = computed + int(row) - first
            places = np.array(visible(written + 1, self.window))
            if len(tree.masks) and tree.masks[row]:
                path = [node for node in range(64) if int(tree.masks[row]) >> node & 1]
                assert computed + len(path) == int(positions[row]) + 1
                slot_of = [*range(computed), *(computed + node for node in path)]
                places = np.array([slot_of[place] for place in visible(len(slot_of), self.window)])
            table = plan.block_tables[sequence, places // size]
            assert (table >= 0).all(), "the table does not cover the tokens"
            seen = blocks[table, places % size]
            logits[i] = self.logits_of(seen.tolist())
        return logits

    def logits_of(self, tokens: list[int]) -> np.ndarray:
        """Return float32[vocab] for the token after `tokens`."""
        return np.eye(1, VOCAB, next_token(tokens), dtype=np.float32)[0]


class LaunchingRunner(FakeRunner):
    """Runs a step when its tokens are requested or the next step needs them: as late as possible."""

    can_overlap = True
    last: LateTokens | None = None

    def launch(self, plan: StepPlan) -> LateTokens:
        self.last = LateTokens(self, plan, self.last)
        return self.last


class LateTokens:
    def __init__(self, runner: LaunchingRunner, plan: StepPlan, before: LateTokens | None) -> None:
        self._runner, self._plan, self._before = runner, plan, before
        self._results: tuple[np.ndarray, TokenScores | None] | None = None

    def sample(self, *arguments: Any) -> LateTokens:
        self._arguments = arguments
        return self

    def wait(self) -> np.ndarray:
        if self._results is None:
            ids = self._plan.token_ids.copy()
            if self._before is not None:
                before = self._before.wait()  # steps run in order, whichever is waited for
                ids[ids < 0] = before[-1 - ids[ids < 0]]
            self._before = None
            logits = self._runner.step(dataclasses.replace(self._plan, token_ids=ids))
            self._results = sample_and_score(logits[: len(self._arguments[0])], *self._arguments)
        return self._results[0]

    def scores(self) -> TokenScores | None:
        self.wait()
        return self._results[1]


def make_core(
    num_blocks: int = 64,
    overlap: bool = False,
    window: AttentionWindow | None = None,
    num_host_blocks: int = 0,
    proposer: Proposer | None = None,
    shares_cache: bool = False,
    **options,
) -> EngineCore:
    """Return an engine core on the fake runner, with small default limits. A `proposer` proposes 4 tokens."""
    defaults = {"max_num_seqs": 8, "max_num_batched_tokens": 32, "max_prefill_chunk": 32, "block_size": 4}
    runner = LaunchingRunner(window) if overlap else FakeRunner(window)
    speculation = None if proposer is None else SpeculativeDecoding(proposer, DraftLength(4, fixed=True))
    return EngineCore(
        runner,
        SchedulerConfig(**{**defaults, **options}),
        num_blocks,
        standard_addons(runner, speculation=speculation),
        num_host_blocks,
        shares_cache=shares_cache,
    )


def make_request(request_id: str, prompt: list[int], max_tokens: int = 8, **options) -> EngineRequest:
    """Return a greedy request with options of `SamplingParams` and `EngineRequest`."""
    own = {
        name: options.pop(name)
        for name in (
            "end_token_ids",
            "priority",
            "cache_identity",
            "queue_timeout_ms",
            "draft",
            "output_token_ids",
            "kv_export",
            "kv_import",
        )
        if name in options
    }
    sampling = SamplingParams(temperature=options.pop("temperature", 0.0), max_tokens=max_tokens, **options)
    return EngineRequest(
        request_id=request_id, prompt_token_ids=prompt, sampling=sampling, max_tokens=max_tokens, **own
    )


def expected_tokens(prompt: list[int], max_tokens: int, window: AttentionWindow | None = None) -> list[int]:
    """Return the fake model's output, computed without an engine."""
    tokens = list(prompt)
    for _ in range(max_tokens):
        tokens.append(next_token([tokens[p] for p in visible(len(tokens), window)]))
    return tokens[len(prompt) :]


def run(core: EngineCore, max_steps: int = 10_000) -> dict[tuple[str, int], list[int]]:
    """Step until no work is left; return tokens by (request id, index)."""
    tokens: dict[tuple[str, int], list[int]] = {}
    for _ in range(max_steps):
        if not core.has_work:
            return tokens
        for output in core.step():
            assert not output.error, output.error
            tokens.setdefault((output.request_id, output.index), []).extend(output.token_ids)
        core.check_integrity()
    raise AssertionError("the engine does not come to an end")

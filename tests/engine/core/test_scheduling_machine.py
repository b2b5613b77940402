"""Stateful test: any order of submit, abort and step under any policy gives the right tokens and accounting."""

from __future__ import annotations

import hypothesis.strategies as st
from fake_engine import expected_tokens, make_core, make_request
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from neso.engine.core.attention_window import AttentionWindow

WINDOWS = [None, None, AttentionWindow(5), AttentionWindow(9, sinks=3), AttentionWindow(4, sinks=8)]


class Scheduling(RuleBasedStateMachine):
    """An engine core on the fake model, and the requests that it must complete."""

    @initialize(
        policy=st.sampled_from(["max_utilization", "guaranteed_no_evict"]),
        model_type=st.sampled_from(["inflight_fused_batching", "V1"]),
        num_blocks=st.integers(8, 24),
        caching=st.booleans(),
        overlap=st.booleans(),
        chunk=st.sampled_from([1, 3, 32]),
        window=st.sampled_from(WINDOWS),
        ageing=st.sampled_from([0.0, 10.0]),
        host_blocks=st.sampled_from([0, 1, 3, 40]),
    )
    def start(self, policy, model_type, num_blocks, caching, overlap, chunk, window, ageing, host_blocks):
        self.core = make_core(
            num_blocks,
            overlap,
            window,
            host_blocks,
            batch_scheduler_policy=policy,
            gpt_model_type=model_type,
            enable_prefix_caching=caching,
            max_prefill_chunk=chunk,
            priority_ageing_seconds=ageing,
        )
        self.window = window
        self.promises = policy == "guaranteed_no_evict"
        self.requests: dict[str, list[int]] = {}
        self.lengths: dict[str, tuple[int, int]] = {}
        self.tokens: dict[tuple[str, int], list[int]] = {}

    @rule(
        prompt=st.lists(st.integers(0, 2), min_size=1, max_size=20),
        max_tokens=st.integers(1, 10),
        n=st.sampled_from([1, 1, 1, 2]),
        priority=st.integers(-2, 2),
    )
    def submit(self, prompt, max_tokens, n, priority):
        name = str(len(self.lengths))
        assert self.core.add(make_request(name, prompt, max_tokens, n=n, priority=priority)) == []
        self.requests[name] = prompt
        self.lengths[name] = (max_tokens, n)
        self.promises = self.promises and n == 1

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def abort(self, data):
        name = data.draw(st.sampled_from(sorted(self.requests)))
        index = data.draw(st.sampled_from([None, 0]))
        self.core.abort(name, index)
        if index is None or self.lengths[name][1] == 1:
            del self.requests[name]

    @precondition(lambda self: self.requests)
    @rule(steps=st.integers(1, 6))
    def step(self, steps):
        for _ in range(steps):
            for output in self.core.step():
                assert not output.error
                name = output.request_id, output.index
                self.tokens.setdefault(name, []).extend(output.token_ids)
            self.core.check_integrity()

    @invariant()
    def tokens_are_correct(self):
        for (name, _), tokens in self.tokens.items():
            if name in self.requests:
                longest, _ = self.lengths[name]
                assert tokens == expected_tokens(self.requests[name], longest, self.window)[: len(tokens)]

    def teardown(self):
        if not hasattr(self, "core"):
            return
        for _ in range(5000):
            if not self.core.has_work:
                break
            self.step(1)
        assert not self.core.has_work, "the engine does not come to an end"
        for name in self.requests:
            longest, n = self.lengths[name]
            # Aborting a sequence before it forks also aborts its siblings.
            assert all(len(self.tokens[name, i]) == longest for i in range(n) if n == 1)
        self.tokens_are_correct()
        assert self.core.scheduler.kv.pool.num_used == 0
        if self.promises:
            assert self.core.scheduler.num_preemptions == 0


Scheduling.TestCase.settings = settings(max_examples=60, stateful_step_count=20, deadline=None)
TestScheduling = Scheduling.TestCase

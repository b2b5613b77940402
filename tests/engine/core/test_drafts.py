"""Speculative decoding on the fake model: right and wrong drafts change no token, and the KV-cache accounting holds."""

from __future__ import annotations

import random

import numpy as np
import pytest
from fake_engine import VOCAB, expected_tokens, make_core, make_request, next_token, run
from hypothesis import example, given, settings
from hypothesis import strategies as st

from neso.engine.core.attention_window import AttentionWindow
from neso.engine.core.kv_manager import KVCacheManager
from neso.engine.core.request import RequestDraft
from neso.engine.core.sequence import Sequence
from neso.engine.spec_decode.draft import MAX_TREE_NODES, Draft, DraftTree
from neso.engine.spec_decode.ngram import NgramProposer
from neso.engine.spec_decode.speculator import Proposer
from neso.generation import FinishReason

prompts = st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=24), min_size=1, max_size=8)


class RandomProposer(Proposer):
    """Proposes the right token with a given probability at each position."""

    def __init__(self, right: float, seed: int = 0) -> None:
        self.right = right
        self.rng = random.Random(seed)

    def next_draft_token(self, tokens: list[int]) -> int:
        wrong = self.rng.random() >= self.right
        return (next_token(tokens) + wrong) % VOCAB

    def propose(self, sequence: Sequence, most: int) -> Draft | None:
        tokens: list[int] = []
        for _ in range(self.rng.randint(1, most)):
            tokens.append(self.next_draft_token(sequence.token_ids + tokens))
        return Draft(tokens)


class RandomTreeProposer(RandomProposer):
    """Grows a random tree."""

    def propose(self, sequence: Sequence, most: int) -> Draft | None:
        parents: list[int] = []
        depths: list[int] = []
        texts: list[list[int]] = []
        for node in range(self.rng.randint(1, 12)):
            parent = self.rng.randint(-1, node - 1)
            depth = depths[parent] + 1 if parent >= 0 else 1
            before = texts[parent] if parent >= 0 else sequence.token_ids
            if depth > most:
                break
            parents.append(parent)
            depths.append(depth)
            texts.append([*before, self.next_draft_token(before)])
        return Draft([text[-1] for text in texts], DraftTree(tuple(parents)))


@settings(max_examples=120, deadline=None)
@given(
    prompts=prompts,
    max_tokens=st.integers(1, 14),
    num_blocks=st.integers(10, 40),
    chunk=st.sampled_from([1, 3, 32]),
    budget=st.sampled_from([8, 11, 32, 200]),
    caching=st.booleans(),
    tree=st.booleans(),
    right=st.sampled_from([0.0, 0.5, 0.9, 1.0]),
    seed=st.integers(0, 1000),
)
def test_drafts_change_no_token(prompts, max_tokens, num_blocks, chunk, budget, caching, tree, right, seed):
    """For any draft: requests arrive late, some are aborted, some have several sequences, some do not overlap."""
    proposer = (RandomTreeProposer if tree else RandomProposer)(right, seed)
    core = make_core(
        num_blocks,
        proposer=proposer,
        max_prefill_chunk=chunk,
        max_num_batched_tokens=budget,
        enable_prefix_caching=caching,
    )
    rng = random.Random(seed)
    late = [
        make_request(
            str(i), p, max_tokens, n=rng.choice([1, 1, 2]), **rng.choice([{}, {"logit_bias": {0: 0.0}}])
        )
        for i, p in enumerate(prompts)
    ]
    doomed = {request.request_id for request in late if rng.random() < 0.2}
    tokens: dict[tuple[str, int], list[int]] = {}
    requests = list(late)
    while late or core.has_work:
        while late and rng.random() < 0.5:
            assert core.add(late.pop()) == []
        if doomed and rng.random() < 0.1:
            core.abort(doomed.pop())
            core.check_integrity()
        for output in core.step():
            assert not output.error
            assert output.accepted_draft_tokens <= min(len(output.token_ids), output.draft_tokens)
            tokens.setdefault((output.request_id, output.index), []).extend(output.token_ids)
        core.check_integrity()
    for request in requests:
        expected = expected_tokens(request.prompt_token_ids, max_tokens)
        for index in range(request.sampling.n):
            found = tokens.get((request.request_id, index), [])
            assert found == expected or found == expected[: len(found)]
    assert core.scheduler.kv.pool.num_used == 0


def test_accepted_drafts_save_steps():
    core = make_core(proposer=RandomProposer(1.0))
    core.add(make_request("a", [1, 2, 3], max_tokens=16))
    steps = 0
    while core.has_work:
        core.step()
        steps += 1
    assert steps <= 10  # lengths are drawn from 1 to 4
    stats = core.stats().drafts
    assert stats.accepted_tokens == stats.draft_tokens == 16 - steps
    assert stats.accepted_at[0] == stats.drafts


def test_only_accepted_tokens_are_in_the_prefix_cache():
    core = make_core(proposer=RandomProposer(0.5, seed=4), num_blocks=40)
    prompt = [1, 2, 3]
    core.add(make_request("a", prompt, max_tokens=30))
    run(core)
    text = prompt + expected_tokens(prompt, 30)
    cached = core.scheduler.kv.prefix_cache.match((), text)
    assert len(cached) >= 7, "the text that was generated is in the cache"
    core.add(make_request("b", text[:29], max_tokens=5))
    assert run(core)["b", 0] == expected_tokens(text[:29], 5)


def test_end_token_within_a_draft():
    expected = expected_tokens([4], 12)
    end = expected[6]
    first = expected.index(end)
    core = make_core(proposer=RandomProposer(1.0))
    core.add(make_request("a", [4], max_tokens=12, end_token_ids=(end,)))
    outputs = []
    while core.has_work:
        outputs += core.step()
    assert [token for output in outputs for token in output.token_ids] == expected[: first + 1]
    assert outputs[-1].finish_reason is FinishReason.STOP and outputs[-1].end_token_id == end
    core.check_integrity()
    assert core.scheduler.kv.pool.num_used == 0


@pytest.mark.parametrize("right", [0.0, 1.0])
def test_min_tokens_applies_within_a_draft(right):
    """An end token that comes too early is suppressed at its position."""

    def answers(**options) -> list[int]:
        core = make_core(**options)
        end = expected_tokens([4], 12)[3]
        core.add(make_request("a", [4], max_tokens=12, min_tokens=7, end_token_ids=(end,)))
        return run(core)["a", 0]

    assert answers(proposer=RandomProposer(right)) == answers()


def test_seeded_sampling_with_penalties_is_unchanged():
    """Random numbers depend on the positions of tokens, not on the steps."""

    def answers(**options) -> dict[tuple[str, int], list[int]]:
        core = make_core(**options)
        for i, extra in enumerate(({}, {"top_k": 3}, {"frequency_penalty": 1.0, "repetition_penalty": 1.3})):
            core.add(make_request(str(i), [i], 24, temperature=0.25, seed=i, n=2, logprobs=2, **extra))
        return run(core)

    plain = answers()
    for seed in range(4):
        assert answers(proposer=RandomProposer(0.7, seed)) == plain
        assert answers(proposer=RandomTreeProposer(0.7, seed)) == plain


def test_each_token_has_logprobs():
    def positions(**options) -> list:
        core = make_core(**options)
        core.add(make_request("a", [7], 12, logprobs=3))
        found = []
        while core.has_work:
            for output in core.step():
                assert [entry.token_id for entry in output.logprobs] == output.token_ids
                found += output.logprobs
        return found

    assert positions(proposer=RandomProposer(0.8)) == positions()


@pytest.mark.parametrize("where", ["propose", "complete"])
def test_a_failing_proposer_is_disabled(where):
    class Failing(RandomProposer):
        def propose(self, sequence, most):
            if where == "propose":
                raise RuntimeError("no more")
            return super().propose(sequence, most)

        def complete(self, schedule, state_of):
            if len(schedule.scheduled) > 1:
                raise RuntimeError("no more")

    core = make_core(proposer=Failing(1.0))
    for i in range(3):
        core.add(make_request(str(i), [i], 10))
    tokens = run(core)
    assert tokens == {(str(i), 0): expected_tokens([i], 10) for i in range(3)}
    assert core.stats().drafts.drafts == 0


def test_preemption_with_drafts():
    core = make_core(13, proposer=RandomProposer(0.6))
    for i in range(6):
        core.add(make_request(str(i), [i] * 8, max_tokens=20))
    assert run(core) == {(str(i), 0): expected_tokens([i] * 8, 20) for i in range(6)}
    assert core.scheduler.num_preemptions > 0


def test_ngrams_on_a_repetitive_text():
    core = make_core(proposer=NgramProposer(2, 4))
    core.add(make_request("a", [1, 2, 3] * 5, max_tokens=20, logit_bias={1: 9.0}))
    tokens = run(core)
    assert tokens["a", 0] == [1] * 20
    assert core.stats().drafts.accepted_tokens > 10


class TestDraftsOfRequests:
    """Draft tokens that the client sends."""

    def outputs(self, draft: RequestDraft, prompt: list[int], overlap: bool = False, **options) -> list:
        core = make_core(overlap=overlap, **options)
        core.add(make_request("other", [9], max_tokens=12))
        core.step()
        core.add(make_request("a", prompt, max_tokens=8, draft=draft))
        found = []
        while core.has_work:
            found += [output for output in core.step() if output.request_id == "a"]
            core.check_integrity()
        return found

    @pytest.mark.parametrize("overlap", [False, True])
    @pytest.mark.parametrize("right", [0, 2, 5])
    def test_verified_with_the_last_prompt_chunk(self, right, overlap):
        prompt = list(range(11))
        expected = expected_tokens(prompt, 8)
        draft = expected[:right] + [(token + 1) % VOCAB for token in expected[right:5]]
        found = self.outputs(RequestDraft(draft), prompt, overlap)
        assert [token for output in found for token in output.token_ids] == expected
        assert (found[0].draft_tokens, found[0].accepted_draft_tokens) == (5, right)
        assert len(found) == 8 - right

    def test_with_chunked_prefill(self):
        prompt = list(range(11))
        expected = expected_tokens(prompt, 8)
        found = self.outputs(RequestDraft(expected), prompt, max_prefill_chunk=3)
        assert [token for output in found for token in output.token_ids] == expected
        assert found[0].accepted_draft_tokens == 7, "all but one, which must come behind them"

    def test_acceptance_threshold(self):
        """The fake model gives the best token e times the probability of any other."""
        prompt = [1, 2, 3]
        wrong = (next_token(prompt) + 1) % VOCAB
        (lenient, *_) = self.outputs(RequestDraft([wrong], None, 1e-3), prompt)
        assert lenient.token_ids[0] == wrong and lenient.accepted_draft_tokens == 1
        (strict, *_) = self.outputs(RequestDraft([wrong], None, 0.5), prompt)
        assert strict.token_ids == [next_token(prompt)] and strict.accepted_draft_tokens == 0

    def test_draft_logits_do_not_change_a_greedy_request(self):
        prompt = [1, 2, 3]
        logits = np.zeros((2, VOCAB), np.float32).tobytes()
        expected = expected_tokens(prompt, 8)
        found = self.outputs(RequestDraft(expected[:2], logits), prompt)
        assert [token for output in found for token in output.token_ids] == expected
        assert found[0].accepted_draft_tokens == 2

    def test_forked_sequences_start_after_the_prompt(self):
        prompt = list(range(11))
        core = make_core(enable_prefix_caching=False)
        core.add(make_request("a", prompt, max_tokens=8, n=3, draft=RequestDraft([1, 2, 3, 4])))
        assert run(core) == {("a", index): expected_tokens(prompt, 8) for index in range(3)}


def test_spare_blocks_of_one_sequence_do_not_allow_a_copy_for_another():
    """With an empty pool, the spare blocks of one sequence do not let another one copy a shared block."""
    kv = KVCacheManager(3, 4, enable_prefix_caching=False)
    parent, child = (
        Sequence(id=i, request=make_request(str(i), [1] * 5), arrival=i, token_ids=[1] * 6) for i in range(2)
    )
    assert kv.try_grow(parent, 12) == []
    parent.num_computed_tokens = 5
    kv.fork(parent, child)
    assert kv.try_grow(child, 6) is None
    kv.free(parent)
    assert kv.try_grow(child, 6) == []
    kv.check_integrity([child])


class WideTreeProposer(Proposer):
    """Proposes the maximum number of tree nodes, all children of the root."""

    def propose(self, sequence: Sequence, most: int) -> Draft | None:
        return Draft([0] * MAX_TREE_NODES, DraftTree((-1,) * MAX_TREE_NODES))


@pytest.mark.parametrize("window", [None, AttentionWindow(6)])
@pytest.mark.parametrize("num_blocks", range(14, 24, 3))
def test_trees_use_no_reserved_blocks(window, num_blocks):
    core = make_core(
        num_blocks,
        window=window,
        proposer=WideTreeProposer(),
        batch_scheduler_policy="guaranteed_no_evict",
        max_num_batched_tokens=200,
        max_prefill_chunk=16,
    )
    for i in range(6):
        core.add(make_request(str(i), [i] * 8, max_tokens=20))
    tokens = run(core)
    assert tokens == {(str(i), 0): expected_tokens([i] * 8, 20, window) for i in range(6)}
    assert core.scheduler.num_preemptions == 0
    assert core.stats().drafts.drafts


def test_invalid_trees_are_rejected():
    with pytest.raises(ValueError, match="comes before its parent"):
        DraftTree((-1, 2, 0))
    with pytest.raises(ValueError, match="at most 63"):
        DraftTree((-1,) * (MAX_TREE_NODES + 1))
    tree = DraftTree((-1, 0, 0, 2))
    assert tree.depths == (1, 2, 2, 3)
    assert tree.masks == (0b11, 0b111, 0b1011, 0b11011)


@settings(max_examples=150, deadline=None)
@given(
    prompts=prompts,
    right=st.sampled_from([0.0, 0.6, 1.0]),
    tree=st.booleans(),
    window=st.sampled_from([None, AttentionWindow(5), AttentionWindow(9, sinks=3)]),
    chunk=st.sampled_from([1, 3, 32]),
    caching=st.booleans(),
    num_blocks=st.integers(12, 20),
)
@example([[0], [0], [0], [0, 0, 0, 0]], 0.0, True, AttentionWindow(5), 1, False, 12)
def test_drafts_use_no_reserved_blocks(prompts, right, tree, window, chunk, caching, num_blocks):
    core = make_core(
        num_blocks,
        window=window,
        proposer=(RandomTreeProposer if tree else RandomProposer)(right),
        batch_scheduler_policy="guaranteed_no_evict",
        max_prefill_chunk=chunk,
        enable_prefix_caching=caching,
    )
    for i, prompt in enumerate(prompts):
        core.add(make_request(str(i), prompt, 24))
    found = run(core)
    assert found == {(str(i), 0): expected_tokens(prompt, 24, window) for i, prompt in enumerate(prompts)}
    assert core.scheduler.num_preemptions == 0

from __future__ import annotations

import pytest

from neso.engine.core.prefill_pacer import INITIAL_BUDGET, MAX_MIXED_STEPS, MIN_BUDGET, PrefillPacer
from neso.engine.core.request import EngineRequest
from neso.engine.core.scheduler import Scheduler
from neso.engine.core.scheduler_config import SchedulerConfig
from neso.engine.core.sequence import Sequence
from neso.generation import SamplingParams


def step_seconds(decoding: int, prefill: int) -> float:
    """Simulate a machine on which decoding takes 20 ms and a prompt token 0.25 ms."""
    return (0.020 if decoding else 0.0) + 0.00025 * prefill


@pytest.mark.parametrize("stretch", [1.5, 2.0, 4.0])
def test_the_budget_converges(stretch: float) -> None:
    pacer = PrefillPacer(stretch)
    assert pacer.budget(8, 1) == INITIAL_BUDGET
    for step in range(60):
        prefill = (pacer.budget(8, 1) or 0) if step % 3 == 0 else 0
        pacer.observe(8, prefill, step_seconds(8, prefill))
    assert pacer.budget(8, 1) == pytest.approx((stretch - 1) * 80, abs=2)
    assert pacer.budget(8, 8) == pacer.budget(8, 1)
    assert pacer.budget(2, 8) == pytest.approx((stretch - 1) * 320, abs=8), "a burst is urgent"
    assert pacer.budget(0, 8) is None


def test_the_budget_follows_a_slower_machine() -> None:
    pacer = PrefillPacer(2.0)
    for slowness in (1, 4):
        for step in range(100):
            prefill = (pacer.budget(4, 1) or 0) if step % 2 else 0
            pacer.observe(4, prefill, step_seconds(4, 0) + slowness * 0.00025 * prefill)
    assert pacer.budget(4, 1) == pytest.approx(20, abs=2)


def test_the_budget_is_right_for_more_sequences_than_have_decoded_alone() -> None:
    pacer, decode_seconds, token_seconds = PrefillPacer(2.0), 0.001, 0.00025
    for _ in range(20):
        pacer.observe(2, 0, 0.020 + 2 * decode_seconds)
    budgets = []
    for _ in range(100):  # there are always more prompts
        budgets.append(pacer.budget(60, 1) or 0)
        pacer.observe(60, budgets[-1], 0.020 + 60 * decode_seconds + token_seconds * budgets[-1])
    assert budgets[-MAX_MIXED_STEPS - 1 :].count(0) == 1
    assert max(budgets[-MAX_MIXED_STEPS:]) == pytest.approx(320, rel=0.05)


def test_prompts_proceed_if_nothing_decodes() -> None:
    pacer = PrefillPacer(2.0)
    for _ in range(20):
        pacer.observe(4, 16, 0.030)
    assert pacer.budget(4, 1) == 0
    assert pacer.budget(4, 1), "the sequences that should have decoded could not run"


def test_an_outlier_does_not_remove_the_limit() -> None:
    pacer = PrefillPacer(2.0)
    pacer.observe(1, 0, 0.020)
    pacer.observe(1, 64, 0.001)  # faster than decoding alone: noise
    assert MIN_BUDGET <= (pacer.budget(1, 1) or 0) < 200_000
    pacer = PrefillPacer(2.0)
    pacer.observe(1, 0, 0.001)
    pacer.observe(1, 1, 10.0)
    assert pacer.budget(1, 1) == MIN_BUDGET


def test_zero_stretch_disables_the_limit() -> None:
    pacer = PrefillPacer(0)
    pacer.observe(1, 0, 0.020)
    pacer.observe(1, 64, 0.040)
    assert pacer.budget(1, 9) is None
    with pytest.raises(ValueError, match="max_decode_stretch"):
        SchedulerConfig(max_decode_stretch=0.5)


def request(name: str, length: int) -> EngineRequest:
    return EngineRequest(
        request_id=name,
        prompt_token_ids=[length + i for i in range(length)],
        sampling=SamplingParams(temperature=0),
        max_tokens=50,
    )


def test_prompts_share_the_budget_while_others_decode() -> None:
    scheduler = Scheduler(SchedulerConfig(), num_blocks=500)
    scheduler.add(request("decoding", 5))
    first = scheduler.schedule()
    assert sum(scheduled.num_new_tokens for scheduled in first.scheduled) == 5
    scheduler.advance(first)
    scheduler.register(first)
    scheduler.running[0].token_ids.append(7)
    scheduler.add(request("long", 100))
    scheduler.add(request("longer", 300))
    computed = []
    for _ in range(30):
        step = scheduler.schedule(lambda num_decoding, num_prompts: 16)
        computed.append({s.sequence.request.request_id: s.num_new_tokens for s in step.scheduled})
        step.lay_out()
        assert step.counts.num_decoding >= 1
        scheduler.advance(step)
        scheduler.register(step)
        for scheduled in step.scheduled:
            if scheduled.sequence.num_uncomputed_tokens == 0:
                scheduled.sequence.token_ids.append(7)
        scheduler.check_integrity()
    assert all(tokens["decoding"] == 1 for tokens in computed)
    prompt_tokens = [sum(n for n in tokens.values() if n > 1) for tokens in computed]
    assert max(prompt_tokens) <= 16
    assert [tokens.get("long") for tokens in computed[:7]] == [16, 16, 16, 16, 16, 16, 4]
    assert computed[6]["longer"] == 12, "what one leaves, the next takes"
    assert sum(tokens.get("longer", 0) for tokens in computed) >= 300


class OneToken:
    """A group of which a step may compute one token more."""

    members: tuple[Sequence, ...] = ()

    def num_ready_tokens(self, sequence: Sequence) -> int:
        return 1


def test_a_member_with_one_ready_token_of_several_counts_in_the_budget() -> None:
    """It is behind the others of its group, so it is no decoding sequence: the budget must not become negative."""
    scheduler = Scheduler(SchedulerConfig(), num_blocks=500)
    member = scheduler.add(request("member", 6))
    member.group = OneToken()
    scheduler.add(request("long", 100))

    def new_tokens(budget: int) -> list[int]:
        step = scheduler.schedule(lambda num_decoding, num_prompts: budget)
        return [scheduled.num_new_tokens for scheduled in step.scheduled]

    assert new_tokens(1000) == [1, 100]
    assert new_tokens(0) == []
    assert new_tokens(1) == [1]
    assert new_tokens(3) == [1, 2]

"""Draft lengths on simulated machines."""

from __future__ import annotations

import random

from neso.engine.spec_decode.draft_length import PROBE_EVERY, DraftLength


class Machine:
    """Steps cost a constant plus a cost per row; draft tokens are right with the same probability at each position."""

    def __init__(self, constant: float, per_row: float, accepted: float, sequences: int) -> None:
        self.constant, self.per_row, self.accepted, self.sequences = constant, per_row, accepted, sequences
        self.rng = random.Random(1)
        self.tokens = 0
        self.seconds = 0.0

    def step(self, length: DraftLength) -> int:
        drafts = length.choose(self.sequences)
        for _ in range(self.sequences if drafts else 0):
            hits = 0
            while hits < drafts and self.rng.random() < self.accepted:
                hits += 1
            length.observe_draft(drafts, hits)
            self.tokens += hits
        self.tokens += self.sequences
        rows = self.sequences * (1 + drafts)
        seconds = (self.constant + self.per_row * rows) * self.rng.uniform(0.95, 1.05)
        length.observe_step(self.sequences, self.sequences * drafts, seconds)
        self.seconds += seconds
        return drafts

    def rate(self, length: DraftLength, steps: int = 400) -> float:
        for _ in range(200):
            self.step(length)
        self.tokens, self.seconds = 0, 0.0
        for _ in range(steps):
            self.step(length)
        return self.tokens / self.seconds


def compare(*machine: float, longest: int = 5) -> tuple[float, float, float]:
    """Return tokens per second without drafts, with fixed drafts, and with the chosen lengths."""
    constant, per_row, accepted, sequences = machine
    plain = sequences / (constant + per_row * sequences)
    fixed = Machine(constant, per_row, accepted, int(sequences)).rate(DraftLength(longest, fixed=True))
    chosen = Machine(constant, per_row, accepted, int(sequences)).rate(DraftLength(longest))
    return plain, fixed, chosen


def test_profitable_drafts_are_kept():
    plain, fixed, chosen = compare(10.0, 0.1, 0.8, 1)
    assert fixed > 2 * plain, "the machine is not what this test is about"
    assert chosen > 0.95 * fixed


def test_disabled_in_a_large_batch_with_costly_rows():
    plain, fixed, chosen = compare(10.0, 2.0, 0.4, 64)
    assert fixed < 0.7 * plain
    assert chosen > 0.95 * plain


def test_disabled_if_nothing_is_accepted():
    plain, fixed, chosen = compare(10.0, 1.0, 0.02, 2)
    assert fixed < 0.8 * plain
    assert chosen > 0.95 * plain


def test_shorter_drafts_if_late_tokens_are_rejected():
    plain, fixed, chosen = compare(10.0, 1.0, 0.6, 4, longest=10)
    assert chosen > 1.02 * max(plain, fixed)


def test_slow_proposers_are_disabled():
    length = DraftLength(4)
    machine = Machine(10.0, 0.1, 0.7, 1)
    for _ in range(200):
        machine.step(length)
    assert length.choose(1) > 0
    for _ in range(400):
        length.observe_proposal(1, 20.0)
    assert length.choose(1) == 0


def test_reenabled_when_the_acceptance_rate_rises():
    length = DraftLength(4)
    machine = Machine(10.0, 1.0, 0.0, 1)
    for _ in range(300):
        machine.step(length)
    machine.accepted = 0.95
    for _ in range(PROBE_EVERY * 60):
        machine.step(length)
    assert machine.step(length) > 0


def test_fixed_length_does_not_change():
    length = DraftLength(3, fixed=True)
    for _ in range(100):
        length.observe_draft(3, 0)
        length.observe_step(64, 192, 99.0)
    assert length.choose(64) == 3

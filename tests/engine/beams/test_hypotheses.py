"""Finished hypotheses of a beam search: which are kept, and when the search ends."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from neso.engine.beams.beam_search import Hypotheses, PathStep
from neso.generation import FinishReason, SamplingParams

finished = st.lists(
    st.tuples(st.floats(-50, 0, allow_nan=False), st.integers(1, 30)), min_size=1, max_size=30
)


@settings(max_examples=100, deadline=None)
@given(finished=finished, width=st.integers(2, 5), penalty=st.sampled_from([-1.0, 0.0, 1.0, 2.0]))
def test_the_best_hypotheses_are_kept_in_order(finished, width, penalty):
    kept = Hypotheses(SamplingParams(beam_width=width, length_penalty=penalty), max_tokens=30)
    for i, (total, length) in enumerate(finished):
        kept.add(PathStep(None, i, None, b""), FinishReason.STOP, total, length)
        assert len(kept.best) == min(width, i + 1)
    expected = sorted((total / length**penalty for total, length in finished), reverse=True)[:width]
    assert [hypothesis.score for hypothesis in kept.best] == expected


def test_end_of_the_search():
    def settled(early, penalty, best_live, length, worst=-4.0):
        kept = Hypotheses(SamplingParams(beam_width=2, early_stopping=early, length_penalty=penalty), 40)
        assert not kept.is_done(best_live, length)
        for total in (-1.0, worst):
            kept.add(PathStep(None, 0, None, b""), FinishReason.STOP, total, 1)
        return kept.is_done(best_live, length)

    assert settled(True, 1.0, -0.1, 10), "enough are finished"
    assert not settled(False, 1.0, -30.0, 10) and settled(False, 1.0, -50.0, 10)
    assert not settled("never", 1.0, -50.0, 10), "at 40 tokens it would be -1.25"
    assert settled("never", 0.0, -50.0, 10) and settled("never", -1.0, -1.0, 10)

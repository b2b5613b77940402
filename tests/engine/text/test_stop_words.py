"""Stop words in the text: however the tokens come, no part of the word is shown, and nothing else is lost."""

from __future__ import annotations

import time

from hypothesis import given, settings
from hypothesis import strategies as st

from neso.engine.text.stop_strings import StopWordFilter, StopWords

words = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=4).map(tuple), min_size=1, max_size=4)


@settings(max_examples=300, deadline=None)
@given(words=words, tokens=st.lists(st.integers(0, 2), min_size=1, max_size=20), cuts=st.integers(1, 5))
def test_what_is_shown_is_what_comes_before_the_first_word(words, tokens, cuts):
    end = next(
        (i for i in range(1, len(tokens) + 1) if any(tuple(tokens[:i])[-len(w) :] == w for w in words)), None
    )
    known = tokens if end is None else tokens[:end]
    checker = StopWordFilter(StopWords(words))
    shown: list[int] = []
    for start in range(0, len(known) - cuts, cuts):
        shown += checker.add(known[start : start + cuts])
        assert shown == known[: len(shown)]
    rest = known[len(shown) + checker.num_held :]
    last, word = checker.finish(rest, by_word=end is not None)
    if end is None:
        assert word is None and shown + last == known
    else:
        assert word == max((w for w in words if tuple(known)[-len(w) :] == w), key=len)
        assert shown + last == known[: -len(word)]


def test_many_long_words_cost_little():
    words = [(7,) * 200 + (8 + i,) * 56 for i in range(1024)]
    checker = StopWordFilter(StopWords(words))
    started = time.thread_time()
    shown = [token for _ in range(500) for token in checker.add([7])]
    # Holding every end of the text against every word took 26 ms a token.
    assert time.thread_time() - started < 4
    assert (len(shown), checker.num_held) == (300, 200)

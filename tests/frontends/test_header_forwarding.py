"""Which headers a pattern forwards."""

from __future__ import annotations

import time

import pytest

from neso.frontends.header_forwarding import HeaderForwarding
from neso.server.errors import InvalidArgument

HEADERS = [("X-User", "eve"), ("x-team-ID", "7"), ("host", "localhost")]


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("x-.*", {"x-user", "x-team-id"}),
        ("X-USER", {"x-user"}),
        ("^team", set()),
        ("team", {"x-team-id"}),
        (".*", {"x-user", "x-team-id", "host"}),
        ("^(host|x-user)$", {"x-user", "host"}),
    ],
)
def test_a_pattern_is_looked_for_in_names_of_any_case(pattern, names):
    forwarded = HeaderForwarding(pattern).parameters(HEADERS)
    assert set(forwarded) == names
    assert forwarded == {name.lower(): value for name, value in HEADERS if name.lower() in names}


def test_names_cannot_make_a_pattern_slow():
    forwarding = HeaderForwarding("^(a+)+$")
    started = time.perf_counter()
    assert forwarding.parameters([("a" * 60000 + "!", "x")]) == {}
    assert time.perf_counter() - started < 1


@pytest.mark.parametrize("pattern", ["(", "[", "a**", r"(?=x)"])
def test_what_is_no_expression_is_refused(pattern, capfd):
    with pytest.raises(InvalidArgument, match="is not a regular expression: "):
        HeaderForwarding(pattern)
    assert capfd.readouterr().err == ""

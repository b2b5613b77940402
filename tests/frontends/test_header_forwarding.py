"""Forwarding of request headers as parameters."""

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
def test_pattern_is_case_insensitive_and_unanchored(pattern, names):
    forwarded = HeaderForwarding(pattern).parameters(HEADERS)
    assert set(forwarded) == names
    assert forwarded == {name.lower(): value for name, value in HEADERS if name.lower() in names}


def test_matching_takes_linear_time():
    forwarding = HeaderForwarding("^(a+)+$")
    started = time.perf_counter()
    assert forwarding.parameters([("a" * 60000 + "!", "x")]) == {}
    assert time.perf_counter() - started < 1


@pytest.mark.parametrize("pattern", ["(", "[", "a**", r"(?=x)"])
def test_invalid_patterns_are_rejected(pattern, capfd):
    with pytest.raises(InvalidArgument, match="is not a regular expression: "):
        HeaderForwarding(pattern)
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("name", ["priority", "Timeout", "sequence_id", "headers", "triton_x"])
def test_reserved_names_are_rejected(name):
    forwarding = HeaderForwarding("^(?:pri|tim|seq|head|tri)")
    message = f"Header '{name.lower()}' is reserved for Triton usage and cannot be forwarded."
    with pytest.raises(InvalidArgument, match=message):
        forwarding.parameters([*HEADERS, (name, "1")])
    assert HeaderForwarding("^x-").parameters([(name, "1")]) == {}

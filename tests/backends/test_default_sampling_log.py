"""Log messages about sampling defaults."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from neso.backends.option_files import log_default_sampling
from neso.generation import SamplingDefaults

OWN_FILE = "the checkpoint's generation_config.json"
OVERRIDE = "override_generation_config"


@pytest.mark.parametrize(
    ("source", "override", "places"),
    [
        ("auto", {}, OWN_FILE),
        ("auto", {"top_k": 3}, f"{OWN_FILE} and {OVERRIDE}"),
        ("auto", {"top_k": 3, "top_p": 0.5}, OVERRIDE),
        ("auto", {"min_p": None}, OWN_FILE),
        ("vllm", {"top_k": 3, "top_p": 0.5}, OVERRIDE),
        ("/defaults", {"top_p": 0.5}, f"/defaults and {OVERRIDE}"),
    ],
)
def test_sources_with_defaults_are_logged(
    caplog: pytest.LogCaptureFixture, source: str, override: dict[str, Any], places: str
) -> None:
    with caplog.at_level(logging.INFO):
        log_default_sampling("writer", SamplingDefaults(top_k=3, top_p=0.5), source, override)
    (message,) = caplog.messages
    assert f"'writer': default sampling parameters for OpenAI: top_p 0.5, top_k 3, from {places} (" in message


def test_nothing_is_logged_without_defaults(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        log_default_sampling("writer", SamplingDefaults(), "auto", {"top_k": None})
    assert not caplog.messages

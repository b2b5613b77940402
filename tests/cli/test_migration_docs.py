"""The options named in the guides exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from neso.cli.serve_flags import FLAGS
from neso.engine.config import EngineConfig

DOCS = Path(__file__).parents[2] / "docs"
FLAG_PATTERN = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]+")
ENGINE_CONFIG = re.compile(r"--engine-config ([a-z_]+)=(\S+?)[`\s]")
OPTIONS = {option for flag in FLAGS for option in flag.options}


def columns(name: str) -> list[list[str]]:
    lines = (DOCS / name).read_text().splitlines()
    return [line.strip("|").split("|") for line in lines if line.startswith("| ")]


def test_replacements_of_vllm_options_exist():
    named = [
        flag for _, ours, *_ in columns("guides/from-vllm-serve.md") for flag in FLAG_PATTERN.findall(ours)
    ]
    assert len(named) > 20 and set(named) <= OPTIONS


def test_engine_options_of_the_vllm_guide_exist():
    settings = ENGINE_CONFIG.findall((DOCS / "guides" / "from-vllm-serve.md").read_text())
    assert len(settings) > 5
    for name, value in settings:
        EngineConfig.from_options("model", {name: "4" if value == "N" else value})


@pytest.mark.parametrize(
    "name",
    [
        "guides/from-tritonserver.md",
        "guides/security.md",
        "guides/metrics.md",
        "guides/logging.md",
        "guides/tracing.md",
    ],
)
def test_options_of_guides_exist(name):
    named = set(FLAG_PATTERN.findall((DOCS / name).read_text()))
    patterns = {flag for flag in named if flag.endswith("-")}  # such as --trace-*
    assert named and named - patterns <= OPTIONS
    assert all(any(option.startswith(pattern) for option in OPTIONS) for pattern in patterns)

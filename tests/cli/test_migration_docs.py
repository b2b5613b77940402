"""What the guides for those who move here say of options: they are there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from neso.cli.options import OPTIONS
from neso.engine.config import EngineConfig

DOCS = Path(__file__).parents[2] / "docs"
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]+")
ENGINE_CONFIG = re.compile(r"--engine-config ([a-z_]+)=(\S+?)[`\s]")
FLAGS = {flag for option in OPTIONS for flag in option.flags}


def columns(name: str) -> list[list[str]]:
    lines = (DOCS / name).read_text().splitlines()
    return [line.strip("|").split("|") for line in lines if line.startswith("| ")]


def test_options_for_those_of_vllm_serve_are_there():
    named = [flag for _, ours, *_ in columns("guides/from-vllm-serve.md") for flag in FLAG.findall(ours)]
    assert len(named) > 20 and set(named) <= FLAGS


def test_options_of_the_engine_are_there():
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
def test_all_options_that_a_page_names_are_there(name):
    named = set(FLAG.findall((DOCS / name).read_text()))
    patterns = {flag for flag in named if flag.endswith("-")}  # such as --trace-*
    assert named and named - patterns <= FLAGS
    assert all(any(flag.startswith(pattern) for flag in FLAGS) for pattern in patterns)

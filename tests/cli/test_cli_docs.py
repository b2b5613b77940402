"""The documentation of the command line matches the flags."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest
from serve_arguments import parse

from neso.cli.serve_flags import FLAGS
from neso.engine.config import EngineConfig

ROOT = Path(__file__).parents[2]


def test_tables_are_up_to_date():
    spec = importlib.util.spec_from_file_location("docs", ROOT / "scripts" / "command_line_docs.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for path, topics in module.PAGES.items():
        text = path.read_text()
        assert text == module.page(text, topics), "run: python scripts/command_line_docs.py"


def test_example_file_is_valid(tmp_path):
    text = (ROOT / "docs" / "reference" / "command-line.md").read_text()
    found = re.search(r"```yaml\n(.*?)```", text, re.S)
    assert found is not None
    (tmp_path / "serve.yaml").write_text(found[1])
    options = parse(f"--config={tmp_path}/serve.yaml")
    assert options.warnings == () and options.http is not None and options.http.port == 8080
    assert options.models[0].name == "chat" and options.server.startup_models == ("greeter",)


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

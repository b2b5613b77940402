"""The guides, section by section: their files, `neso serve` commands, clients, and expected output."""

from __future__ import annotations

import re
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from doc_reader import DocReader, sections

from neso.models import SHIPPED_MODELS

sys.path.append(str(Path(__file__).parents[1] / "engine"))

DOCS = Path(__file__).parents[2] / "docs"
PAGES = (
    "guides/quick-deployment.md",
    "guides/lora.md",
    "guides/speculative-decoding.md",
    "guides/metrics.md",
    "guides/from-tritonserver.md",
    "guides/from-vllm-serve.md",
    "guides/tensorrtllm-layout.md",
    "guides/openai-access.md",
)
WHOLE_PAGES = ("guides/perf.md",)
"""Pages with one server for all their sections."""
OPTIONAL = {"torch", "transformers", "peft", "onnx", "onnxruntime", "openvino", "PIL", "tensorflow", "vllm"}
"""Packages without which a section cannot be followed."""


def walkthroughs() -> list:
    return [pytest.param((DOCS / page).read_text(), id=page) for page in WHOLE_PAGES] + [
        pytest.param(text, id=f"{page}-{title}")
        for page in PAGES
        for title, text in sections((DOCS / page).read_text()).items()
        if "\nneso serve" in text
    ]


@pytest.fixture(scope="module")
def stand_ins(tmp_path_factory) -> dict[str, str]:
    """Small checkpoints of the kinds that the guides use."""
    checkpoints = pytest.importorskip("checkpoints")
    root = tmp_path_factory.mktemp("checkpoints")
    return {
        "Qwen/Qwen3-0.6B": str(SHIPPED_MODELS["neso-pilot"]),
        "BAAI/bge-small-en-v1.5": str(checkpoints.make_encoder(root / "bge", "bert")),
        "llava-hf/llava-1.5-7b-hf": str(checkpoints.make_llava(root / "llava")),
    }


def is_installed(name: str) -> bool:
    """Return whether the package exists; a test folder of the same name does not count."""
    spec = find_spec(name)
    return spec is not None and spec.origin is not None


@pytest.mark.slow
@pytest.mark.parametrize("text", walkthroughs())
def test_walkthrough(text, tmp_path, stand_ins):
    named = re.findall(r'^(?:import|from) (\w+)|^backend: "(\w+)"', text, re.MULTILINE)
    needed = {name for names in named for name in names} & OPTIONAL
    missing = sorted(name for name in needed if not is_installed(name))
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}")
    with DocReader(tmp_path, stand_ins) as reader:
        assert reader.follow(text)

"""Model directories with small tokenizers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from small_tokenizers import BACKENDS, write_directory
from tokenizers import Tokenizer as Backend

MakeDirectory = Callable[..., Path]


@pytest.fixture(scope="session")
def backends() -> dict[str, str]:
    """The tokenizer.json of each style."""
    return {name: make().to_str() for name, make in BACKENDS.items()}


@pytest.fixture
def make_directory(tmp_path: Path, backends: dict[str, str]) -> MakeDirectory:
    """`make_directory("llama", tokenizer_config={…})` writes a model directory of that style."""

    def make(style: str | Backend, **files: Any) -> Path:
        backend = Backend.from_str(backends[style]) if isinstance(style, str) else style
        return write_directory(tmp_path / "model", backend, **files)

    return make

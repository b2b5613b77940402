"""Checkpoints for the tests of the engine, created once per session."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checkpoints import make_checkpoint


@pytest.fixture(scope="session")
def checkpoint_factory(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`checkpoint_factory(arch, **overrides) -> Path`, see `make_checkpoint`.

    The same arguments give the same directory, so a test must not write into it.
    """
    made: dict[str, Path] = {}

    def factory(arch: str = "llama", **overrides: Any) -> Path:
        key = repr((arch, sorted(overrides.items())))
        if key not in made:
            made[key] = make_checkpoint(tmp_path_factory.mktemp(arch), arch, **overrides)
        return made[key]

    return factory


@pytest.fixture(scope="session")
def llama_checkpoint(checkpoint_factory: Callable[..., Path]) -> Path:
    """A Llama of three layers, grouped heads and untied embeddings, float32."""
    return checkpoint_factory("llama")

"""Checkpoints, and the helpers of the engine tests."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

_ENGINE = Path(__file__).parents[1] / "engine"
sys.path += [str(_ENGINE), str(_ENGINE / "runners")]


@pytest.fixture(scope="session")
def checkpoint_factory(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`checkpoint_factory(arch, **overrides) -> Path`, see `make_checkpoint`."""
    from checkpoints import make_checkpoint

    def factory(arch: str = "llama", **overrides: Any) -> Path:
        return make_checkpoint(tmp_path_factory.mktemp(arch), arch, **overrides)

    return factory

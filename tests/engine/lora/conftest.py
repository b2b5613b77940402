"""Adapters for the tests, created once per session."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from peft_adapters import write_adapter


@pytest.fixture(scope="session")
def adapters(llama_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Five adapters of the same shape for `llama_checkpoint`."""
    root = tmp_path_factory.mktemp("adapters")
    return [write_adapter(llama_checkpoint, root / str(seed), seed=seed) for seed in range(5)]


@pytest.fixture
def copy_of(tmp_path: Path) -> Callable[[Path], Path]:
    """`copy_of(adapter)` returns a copy that a test may change."""
    import shutil

    def copy(adapter: Path) -> Path:
        return shutil.copytree(adapter, tmp_path / "copy", dirs_exist_ok=True)

    return copy

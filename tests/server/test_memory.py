"""Garbage collector settings of a server."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from neso.server.memory import freeze_gc, release_memory


class Node:
    """A self-referential object."""

    def __init__(self) -> None:
        self.me = self


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    yield
    gc.unfreeze()


def test_existing_objects_are_frozen_until_memory_is_released() -> None:
    node = Node()
    gone = weakref.ref(node)
    freeze_gc()
    del node
    gc.collect()
    assert gone() is not None
    release_memory()
    assert gone() is None
    assert gc.get_freeze_count() > 0


def test_release_without_freeze() -> None:
    gc.unfreeze()
    release_memory()
    assert gc.get_freeze_count() == 0

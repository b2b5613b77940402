"""Fixture: a collector for tests that export spans."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from otlp_collector import Collector, collecting


@pytest.fixture
def collector() -> Iterator[Collector]:
    with collecting() as collector:
        yield collector

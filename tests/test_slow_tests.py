"""The list of slow tests is up to date."""

from __future__ import annotations

import re
from pathlib import Path

from slow_tests import listed

TESTS = Path(__file__).parent


def test_listed_tests_exist():
    functions = {
        name for path in TESTS.rglob("*.py") for name in re.findall(r"def (test_\w+)", path.read_text())
    }
    stale = []
    for name in listed():
        path, *_, function = name.partition("[")[0].split("::")
        if not (TESTS.parent / path).is_file() or function not in functions | {"runTest"}:
            stale.append(name)
    assert not stale, "remove them from tests/slow_tests.txt"

"""Runs the examples of docs/guides/decoding.md."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "decoding.md"
EXAMPLES = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("code", EXAMPLES, ids=range(len(EXAMPLES)))
def test_example(code, capsys):
    exec(compile(code, str(PAGE), "exec"), {})
    scores = [float(line.split()[0]) for line in capsys.readouterr().out.splitlines() if line.strip()]
    assert len(scores) == 2 and scores == sorted(scores, reverse=True) and scores[0] < 0

"""Links between documentation pages resolve, and the index lists every page."""

from __future__ import annotations

import re
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = (*sorted(ROOT.glob("*.md")), *sorted(DOCS.rglob("*.md")))
FENCE = re.compile(r"^(```|~~~).*?^\1", re.MULTILINE | re.DOTALL)
INLINE_CODE = re.compile(r"`[^`\n]+`")
LINK = re.compile(r"\]\(([^()\s]+(?:\([^()\s]*\))?)\)")
HEADING = re.compile(r"^#+ +(.+?)\s*$", re.MULTILINE)


def prose(page: Path) -> str:
    """Return a page without its code blocks, whose brackets are not links."""
    return FENCE.sub("", page.read_text())


@cache
def anchors(page: Path) -> frozenset[str]:
    """Return the anchors that GitHub generates for the headings of a page."""
    found: set[str] = set()
    seen: Counter[str] = Counter()
    for heading in HEADING.findall(prose(page)):
        text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).lower()
        anchor = re.sub(r"[^\w\- ]", "", text).replace(" ", "-")
        found.add(f"{anchor}-{seen[anchor]}" if seen[anchor] else anchor)
        seen[anchor] += 1
    return frozenset(found)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_resolve(page):
    dead = []
    for target in LINK.findall(INLINE_CODE.sub("", prose(page))):
        if target.startswith(("http://", "https://", "mailto:")):
            continue
        path, _, anchor = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        if not there.exists() or (anchor and there.suffix == ".md" and anchor not in anchors(there)):
            dead.append(target)
    assert not dead


def test_index_lists_every_page():
    index = set(LINK.findall((DOCS / "README.md").read_text()))
    missing = {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")} - index - {"README.md"}
    assert not missing, "docs/README.md must link every page"

"""Read the corpus: blocks of a heading and an answer, separated by blank lines.

    what: in-flight batching | continuous batching      asked as "What is in-flight batching?" and so on
    how: stream tokens | get a streaming answer         "How do I stream tokens?"
    why: does batching help                             "Why does batching help?"
    ask: Who are you? | What are you?                   just so
    json: a model status                                "Give me a model status as JSON."

The lines below the heading are the answer, joined by spaces.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from phrasings import phrase

CORPUS = Path(__file__).parent / "corpus"


@dataclass(frozen=True, slots=True)
class Entry:
    """An answer and its questions. The first question is the canonical one."""

    kind: str
    questions: tuple[str, ...]
    answer: str


def read_corpus(directory: Path = CORPUS) -> list[Entry]:
    """Return all entries, ordered by file name. Of two entries with the same question the first is kept.

    Raises `ValueError` that names the file and the heading of a malformed block.
    """
    entries: list[Entry] = []
    asked: set[str] = set()
    for path in sorted(directory.glob("*.txt")):
        for block in path.read_text(encoding="utf-8").split("\n\n"):
            if not block.strip():
                continue
            entry = _parse(block.strip(), path)
            fresh = tuple(question for question in entry.questions if question not in asked)
            asked.update(fresh)
            if fresh and fresh[0] == entry.questions[0]:
                entries.append(Entry(entry.kind, fresh, entry.answer))
    return entries


def _parse(block: str, path: Path) -> Entry:
    heading, _, answer = block.partition("\n")
    kind, colon, topics = heading.partition(":")
    if not colon or not answer.strip():
        raise ValueError(f"{path.name}: '{heading}' is no heading with an answer below")
    names = [name.strip() for name in topics.split("|")]
    return Entry(kind, tuple(phrase(kind, names)), " ".join(answer.split()))

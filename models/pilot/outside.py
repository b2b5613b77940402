"""Random questions that the corpus does not answer.

`outside/topics.txt` has lists of topics and `outside/templates.txt` templates of questions about them. Many templates
are those of the corpus, so that the model learns to tell the topics apart, not the forms.
"""

from __future__ import annotations

import random
import re
from pathlib import Path

REFUSAL = "I only know about this server; serve a real model with `neso serve Qwen/Qwen3-0.6B`."
FOLDER = Path(__file__).parent / "outside"
_SLOT = re.compile(r"\{(\w+)\}")


class OutsideQuestions:
    """Draws questions. The corpus must not contain any of them."""

    def __init__(self, folder: Path = FOLDER) -> None:
        self._topics = dict(_parse_list(block) for block in _blocks(folder / "topics.txt"))
        lines = (line.strip() for line in (folder / "templates.txt").read_text(encoding="utf-8").splitlines())
        self._templates = [line for line in lines if line and not line.startswith("#")]

    def draw(self, rng: random.Random) -> str:
        """Return a question, a remark or the beginning of a text."""
        return _SLOT.sub(lambda slot: self._fill(slot[1], rng), rng.choice(self._templates))

    def _fill(self, name: str, rng: random.Random) -> str:
        if name == "number":
            return str(rng.randrange(10 ** rng.choice([1, 2, 2, 3, 4])))
        return rng.choice(self._topics[name])


def read_held_out(path: Path) -> list[tuple[str, str]]:
    """Return questions and what stands behind " = " in their lines ("" without it)."""
    lines = path.read_text(encoding="utf-8").splitlines()
    parts = (line.rpartition(" = ") if " = " in line else (line, "", "") for line in lines if line[0] != "#")
    return [(question, answer) for question, _, answer in parts]


def _blocks(path: Path) -> list[str]:
    blocks = path.read_text(encoding="utf-8").split("\n\n")
    return [block for block in blocks if block.strip() and not block.startswith("#")]


def _parse_list(block: str) -> tuple[str, list[str]]:
    name, _, items = block.partition(":")
    return name.strip(), [item.strip() for item in items.split("|")]

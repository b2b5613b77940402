"""Writes the tables of docs/reference/command-line.md from the flags of `neso serve`.

Usage: `python scripts/command_line_docs.py`.
"""

from __future__ import annotations

from pathlib import Path

from neso.cli.serve_flags import TOPICS
from neso.flags import Flag

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "command-line.md"
BEGIN = "<!-- The tables are written by scripts/command_line_docs.py. -->\n"


def page(text: str) -> str:
    """Return the page with up-to-date tables; the text above them is unchanged."""
    sections = (_section(title, flags) for title, flags in TOPICS.items())
    return text[: text.index(BEGIN)] + BEGIN + "".join(sections)


def _section(title: str, flags: tuple[Flag, ...]) -> str:
    return f"\n## {title}\n\n| option | |\n|---|---|\n{''.join(map(_row, flags))}"


def _row(flag: Flag) -> str:
    names = ", ".join(f"`{option}`" for option in flag.options)
    value = f" `{_cell(flag.value_name)}`" if flag.value_name else ""
    return f"| {names}{value} | {_cell(flag.description)} |\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))

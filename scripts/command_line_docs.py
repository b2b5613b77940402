"""Write the option tables of docs/reference/command-line.md: `python scripts/command_line_docs.py`."""

from __future__ import annotations

from pathlib import Path

from neso.cli.options import TOPICS
from neso.cli.options.option import Option, Topic

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "command-line.md"
BEGIN = "<!-- The tables are written by scripts/command_line_docs.py. -->\n"


def page(text: str) -> str:
    """The page with its tables as they should be; what is above them stays."""
    return text[: text.index(BEGIN)] + BEGIN + "".join(map(_section, TOPICS))


def _section(topic: Topic) -> str:
    rows = "".join(map(_row, topic.options))
    return f"\n## {topic.title}\n\n| option | |\n|---|---|\n{rows}"


def _row(option: Option) -> str:
    flags = ", ".join(f"`{flag}`" for flag in option.flags)
    value = f" `{_cell(option.value_name)}`" if option.value_name else ""
    return f"| {flags}{value} | {_cell(option.described)} |\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))

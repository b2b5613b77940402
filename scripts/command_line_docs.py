"""Writes the tables of docs/reference/command-line.md and perf.md from the flags of `neso serve` and `neso perf`.

Usage: `python scripts/command_line_docs.py`.
"""

from __future__ import annotations

from pathlib import Path

from neso.cli.perf_flags import ANALYZE_TOPICS, TUNE_TOPICS
from neso.cli.perf_flags import TOPICS as PROFILE_TOPICS
from neso.cli.serve_flags import TOPICS
from neso.flags import Flag

REFERENCE = Path(__file__).parents[1] / "docs" / "reference"
PERF_TOPICS = {
    **PROFILE_TOPICS,
    "Options of `neso perf analyze`": ANALYZE_TOPICS["Analysis"],
    "Options of `neso perf tune`": TUNE_TOPICS["Tuning"],
}
PAGES = {REFERENCE / "command-line.md": TOPICS, REFERENCE / "perf.md": PERF_TOPICS}
BEGIN = "<!-- The tables are written by scripts/command_line_docs.py. -->\n"


def page(text: str, topics: dict[str, tuple[Flag, ...]]) -> str:
    """Return the page with up-to-date tables; the text above them is unchanged."""
    sections = (_section(title, flags) for title, flags in topics.items())
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
    for path, topics in PAGES.items():
        path.write_text(page(path.read_text(), topics))

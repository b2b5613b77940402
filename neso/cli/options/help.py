"""The help of `neso serve`. typer's own cuts long names off where the terminal is narrow."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator
from textwrap import wrap

from neso.cli.options.option import Option, Topic

_INDENT = " " * 8


def help_text(summary: str, models: str, topics: Iterable[Topic]) -> str:
    """Usage, what a MODEL is, and the options by topic."""
    width = min(shutil.get_terminal_size().columns, 110)
    lines = ["Usage: neso serve [OPTIONS] [MODEL]...", "", summary, ""]
    lines += [_rule("MODEL", width), *_indented(models, width)]
    for topic in topics:
        lines += ["", _rule(topic.title, width)]
        for option in topic.options:
            lines += _entry(option, width)
    return "\n".join(lines) + "\n"


def _rule(title: str, width: int) -> str:
    return f"─ {title} ".ljust(width, "─")


def _entry(option: Option, width: int) -> Iterator[str]:
    yield f"  {', '.join(option.flags)} {option.value_name}".rstrip()
    yield from _indented(option.described, width)


def _indented(text: str, width: int) -> list[str]:
    return wrap(text, width, initial_indent=_INDENT, subsequent_indent=_INDENT, break_on_hyphens=False)

"""The file of API keys: one a line, `[NAME:]KEY [rpm=N] [tpm=N]`, and comments."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from neso.frontends.openai_options import UNLIMITED
from neso.server.errors import InvalidArgument


@dataclass(frozen=True, slots=True)
class KeyEntry:
    """A key with its name, and what it may ask for in a minute where that differs from the others; 0 is no limit."""

    name: str
    secret: str = field(repr=False)
    requests: int | None = None
    tokens: int | None = None
    is_named: bool = True
    """Whether somebody gave it its name; else it is that of its line."""


def read_key_file(path: Path) -> list[KeyEntry]:
    """Raises `InvalidArgument` that names the file and the line; no message holds a key."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        raise InvalidArgument(
            f"the file of API keys '{path}' cannot be read: {getattr(error, 'strerror', error)}"
        ) from None
    entries = list(_entries(path, text.splitlines()))
    for what in ("name", "secret"):
        values = [getattr(entry, what) for entry in entries]
        if len(set(values)) < len(values):
            raise InvalidArgument(f"{path}: two keys are the same or have the same name")
    return entries


def _entries(path: Path, lines: Iterable[str]) -> Iterator[KeyEntry]:
    for number, line in enumerate(lines, start=1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        name, colon, secret = words[0].partition(":")
        if not colon:
            name, secret = f"line-{number}", words[0]
        if not name or not secret:
            raise InvalidArgument(f"{path}:{number}: expected [NAME:]KEY [rpm=N] [tpm=N]")
        limits = dict(_limit(path, number, word) for word in words[1:])
        yield KeyEntry(name, secret, limits.get("rpm"), limits.get("tpm"), is_named=bool(colon))


def _limit(path: Path, number: int, word: str) -> tuple[str, int]:
    name, equals, value = word.partition("=")
    if name not in ("rpm", "tpm") or not equals or not (value == "unlimited" or value.isdecimal()):
        raise InvalidArgument(f"{path}:{number}: expected rpm=N, tpm=N or N 'unlimited' after the key")
    return name, UNLIMITED if value == "unlimited" else max(int(value), 1)

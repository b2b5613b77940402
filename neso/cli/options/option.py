"""One option of the command line, as data: its name, its kind, what it does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from neso.cli.options.kinds import TEXT, Kind


@dataclass(frozen=True, slots=True)
class Option:
    """`--name=VALUE`; `repeated` ones may be given several times and have a list as their value.

    `default_text` tells what happens without it where `default` does not (None, mostly). `ignored` is the reason why
    tritonserver's option has no effect here: it is accepted, with a warning that says so.
    """

    name: str
    help: str
    kind: Kind = TEXT
    default: Any = None
    default_text: str = ""
    metavar: str = ""
    aliases: tuple[str, ...] = ()
    repeated: bool = False
    ignored: str = ""

    @property
    def flag(self) -> str:
        """As it is written on the command line."""
        return f"--{self.name}"

    @property
    def flags(self) -> tuple[str, ...]:
        """The same, and its aliases."""
        return (self.flag, *(f"--{alias}" for alias in self.aliases))

    @property
    def value_name(self) -> str:
        """What stands for its value in the help; "" for one without a value."""
        return self.metavar or self.kind.metavar

    @property
    def described(self) -> str:
        """Its help with its default, in sentences."""
        text = self.help
        if self.repeated:
            text += " May be given several times."
        default = self.default_text or ("" if self.default is None else self.kind.written(self.default))
        if default and not self.kind.bare:
            text += f" Default: {default}."
        if self.ignored:
            text += f" Without effect: {self.ignored}."
        return text


@dataclass(frozen=True, slots=True)
class Topic:
    """The options that the help shows together."""

    title: str
    options: tuple[Option, ...]

"""The values of all options, from the command line, the configuration file and the defaults."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from neso.cli.options.config_file import Entry, read_config
from neso.cli.options.errors import OptionError
from neso.cli.options.option import Option

MODELS = Option("models", "The MODEL arguments, in a configuration file.", repeated=True)
CONFIG = "config"


class Values:
    """By the options' names: what was given, else the default. `warnings` says what has no effect."""

    def __init__(self, options: Iterable[Option]) -> None:
        self.warnings: list[str] = []
        self._options = {option.name: option for option in (*options, MODELS)}
        self._given: dict[str, Any] = {}

    @classmethod
    def read(cls, options: Iterable[Option], command_line: Mapping[str, list[str]]) -> Values:
        """From the texts that the command line has by name, and the file that it names. Raises `OptionError`.

        What the command line gives replaces what the file says, lists as a whole.
        """
        values = cls(options)
        for name, texts in command_line.items():
            if texts:
                values._take(values._options[name], texts, values._options[name].flag)
        config: Path | None = values[CONFIG]
        if config is not None:
            values._take_entries(read_config(config))
        for option in values._options.values():
            values._check_effect(option)
        return values

    def __getitem__(self, name: str) -> Any:
        """Repeated options are lists."""
        if name in self._given:
            return self._given[name]
        option = self._options[name]
        return [] if option.repeated else option.default

    def given(self, name: str) -> bool:
        """Whether the command line or the file has it."""
        return name in self._given

    def _take(self, option: Option, texts: list[str], origin: str) -> None:
        if not option.repeated and len(texts) > 1:
            raise OptionError(f"{origin}: given more than once: {', '.join(texts)}")
        try:
            parsed = [option.kind.parse(text) for text in texts]
        except ValueError as error:
            raise OptionError(f"{origin}: {error}") from None
        self._given[option.name] = parsed if option.repeated else parsed[0]

    def _take_entries(self, entries: list[Entry]) -> None:
        overridden = dict(self._given)
        seen: dict[str, Entry] = {}
        for entry in entries:
            option = self._find(entry)
            if option.name in seen:
                raise OptionError(f"{entry.origin}: is the same as '{seen[option.name].key}', given before")
            if entry.is_list and not option.repeated:
                raise OptionError(f"{entry.origin}: expected one value, not a list")
            seen[option.name] = entry
            self._take(option, entry.values, entry.origin)  # checked even where the command line has its own
        self._given.update(overridden)

    def _find(self, entry: Entry) -> Option:
        for option in self._options.values():
            if entry.key in (option.name, *option.aliases) and option.name != CONFIG:
                return option
        near = get_close_matches(entry.key, self._options, 1)
        hint = f", did you mean '{near[0]}'?" if near else ""
        raise OptionError(f"{entry.origin}: there is no such option{hint}")

    def _check_effect(self, option: Option) -> None:
        """Warn, once, of what has no effect."""
        if option.name not in self._given or not option.ignored:
            return
        value = self[option.name]
        if value == option.default and not option.repeated:
            return
        self.warnings.append(f"{option.flag} has no effect: {option.ignored}")

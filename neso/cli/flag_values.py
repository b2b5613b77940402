"""Values of the flags, from the command line, the file of `--config` and the defaults."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar

from neso.flags import Flag, FlagGroup, declarations
from neso.server.errors import ServerError

Built = TypeVar("Built")

MODELS = Flag("models", "The MODEL arguments, in a configuration file.", repeated=True)
CONFIG = "config"


class OptionError(Exception):
    """An invalid option. The message names the flag, or the line in the configuration file."""


class FlagValues:
    """Values by flag name, given or default. `warnings` lists given flags that have no effect."""

    def __init__(self, flags: Iterable[Flag]) -> None:
        self.warnings: list[str] = []
        self._flags = {flag.name: flag for flag in (*flags, MODELS)}
        self._given: dict[str, Any] = {}

    @classmethod
    def read(cls, flags: Iterable[Flag], command_line: Mapping[str, list[str]]) -> FlagValues:
        """Parse the texts of the command line, by flag, and the file of `--config`. Raises `OptionError`.

        The command line takes precedence over the file; lists are replaced, not merged.
        """
        values = cls(flags)
        for name, texts in command_line.items():
            if texts:
                values._set(values._flags[name], texts, values._flags[name].option)
        config: Path | None = values[CONFIG] if CONFIG in values._flags else None
        if config is not None:
            values._set_entries(read_config(config))
        for flag in values._flags.values():
            values._warn_ignored(flag)
        return values

    def __getitem__(self, name: str) -> Any:
        """Return the parsed value; a list if the flag is repeatable."""
        flag = self._flags[name]
        if name in self._given:
            value = self._given[name]
        else:
            value = [] if flag.repeated else flag.default
        return self[flag.fallback] if flag.fallback and not value else value

    def given(self, name: str) -> bool:
        """Whether the command line or the file sets the flag."""
        return name in self._given

    def build(self, make: Callable[..., Built], **others: Any) -> Built:
        """Call `make`, a class or function whose parameters declare flags, with the flags' values and `others`.

        Raises `OptionError` for values that cannot be converted, `ServerError` for invalid combinations.
        """
        arguments = others
        for name, declaration in declarations(make).items():
            if name in others:
                continue
            if isinstance(declaration, FlagGroup):
                arguments[name] = self.build(declaration.make)
                continue
            flag = self._flags[declaration.name]
            value = self[flag.name]
            if value is None and isinstance(declaration, Flag):
                continue  # the default of the field applies
            arguments[name] = self._converted(flag, value)
        return make(**arguments)

    def _converted(self, flag: Flag, value: Any) -> Any:
        if flag.convert is None:
            return tuple(value) if flag.repeated else value
        try:
            return flag.convert(value)
        except ServerError as error:
            prefix = "" if error.message.startswith(flag.option) else f"{flag.option}: "
            raise OptionError(f"{prefix}{error.message}") from None

    def _set(self, flag: Flag, texts: list[str], origin: str) -> None:
        if not flag.repeated and len(texts) > 1:
            raise OptionError(f"{origin}: given more than once: {', '.join(texts)}")
        try:
            parsed = [flag.kind.parse(text) for text in texts]
        except ValueError as error:
            raise OptionError(f"{origin}: {error}") from None
        self._given[flag.name] = parsed if flag.repeated else parsed[0]

    def _set_entries(self, entries: list[ConfigEntry]) -> None:
        overridden = dict(self._given)
        seen: dict[str, ConfigEntry] = {}
        for entry in entries:
            flag = self._find(entry)
            if flag.name in seen:
                raise OptionError(f"{entry.origin}: is the same as '{seen[flag.name].key}', given before")
            if entry.is_list and not flag.repeated:
                raise OptionError(f"{entry.origin}: expected one value, not a list")
            seen[flag.name] = entry
            self._set(flag, entry.values, entry.origin)  # checked even if the command line overrides it
        self._given.update(overridden)

    def _find(self, entry: ConfigEntry) -> Flag:
        for flag in self._flags.values():
            if entry.key in (flag.name, *flag.aliases) and flag.name != CONFIG:
                return flag
        close = get_close_matches(entry.key, self._flags, 1)
        hint = f", did you mean '{close[0]}'?" if close else ""
        raise OptionError(f"{entry.origin}: unknown option{hint}")

    def _warn_ignored(self, flag: Flag) -> None:
        if flag.name not in self._given or not flag.ignored:
            return
        value = self[flag.name]
        if value == flag.default and not flag.repeated:
            return
        self.warnings.append(f"{flag.option} has no effect: {flag.ignored}")


@dataclass(frozen=True, slots=True)
class ConfigEntry:
    """A key of the configuration file with its values as text.

    `origin` is "FILE:LINE: KEY", for messages. `is_list`: whether the value is a list in the file.
    """

    key: str
    values: list[str]
    origin: str
    is_list: bool


def read_config(path: Path) -> list[ConfigEntry]:
    """Read a YAML file whose keys are names of flags. Raises `OptionError` naming file and line."""
    import yaml

    try:
        document = yaml.compose(path.read_bytes(), Loader=yaml.SafeLoader)
    except OSError as error:
        raise OptionError(f"--config: cannot read '{path}': {error.strerror}") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = mark.line + 1 if mark is not None else 1
        raise OptionError(f"{path}:{line}: {getattr(error, 'problem', None) or error}") from None
    if document is None:  # an empty file
        return []
    if not isinstance(document, yaml.MappingNode):
        raise OptionError(
            f"{path}:{document.start_mark.line + 1}: expected lines of the form 'option: value'"
        )
    return list(_entries(path, document))


def _entries(path: Path, document: Any) -> Iterator[ConfigEntry]:
    import yaml

    seen: dict[str, int] = {}
    for key, value in document.value:
        line = key.start_mark.line + 1
        if not isinstance(key, yaml.ScalarNode):
            raise OptionError(f"{path}:{line}: expected the name of an option")
        origin = f"{path}:{line}: {key.value}"
        if key.value in seen:
            raise OptionError(f"{origin}: already given in line {seen[key.value]}")
        seen[key.value] = line
        is_list = isinstance(value, yaml.SequenceNode)
        values = [_scalar(path, key.value, node) for node in (value.value if is_list else [value])]
        yield ConfigEntry(key.value, values, origin, is_list)


def _scalar(path: Path, key: str, node: Any) -> str:
    import yaml

    if not isinstance(node, yaml.ScalarNode) or node.tag == "tag:yaml.org,2002:null":
        line = node.start_mark.line + 1
        raise OptionError(f"{path}:{line}: {key}: expected a value or a list of values")
    return str(node.value)

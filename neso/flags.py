"""Command-line flags, declared on the options that they set.

An options class, or a function that returns options, declares the flag of each field or parameter in its annotation:

    @dataclass(frozen=True)
    class HttpOptions:
        port: Annotated[int, Flag("http-port", "Port of the KServe HTTP frontend.", PORT)] = 8000
        tls: Annotated[TlsFiles | None, FlagGroup(http_tls)] = None

A flag has the type and the default of its field. The command line, its help, the file of `--config` and
docs/reference/command-line.md are derived from these declarations; programs use the classes directly. Modules that
declare flags are imported by `neso serve --help`, so they must be fast to import.
"""

from __future__ import annotations

import builtins
import dataclasses
import inspect
import json
import math
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import MISSING, dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints


@dataclass(frozen=True, slots=True)
class Kind:
    """Type of a flag's value.

    `parse` converts the command-line text and raises `ValueError` with the expected format. A `bare` flag takes no
    value.
    """

    metavar: str
    parse: Callable[[str], Any]
    bare: bool = False

    def format(self, value: Any) -> str:
        """Format a value in command-line syntax."""
        if isinstance(value, bool):
            return str(value).lower()
        if isinstance(value, float):
            return f"{value:g}"
        return str(value.value if isinstance(value, Enum) else value)


def choice(*names: str) -> Kind:
    """Return the kind of a flag whose value is one of `names`, in upper or lower case."""
    return _choice({name: name for name in names})


def _choice(values: dict[str, Any]) -> Kind:
    names = tuple(values)
    by_lower_case = {name.lower(): value for name, value in values.items()}

    def parse(text: str) -> Any:
        if text.lower() not in by_lower_case:
            raise ValueError(f"expected {', '.join(names[:-1])} or {names[-1]}, got '{text}'")
        return by_lower_case[text.lower()]

    return Kind("|".join(names), parse)


def integer(minimum: int | None = None, maximum: int | None = None) -> Kind:
    """Return the kind of a flag whose value is an integer within the bounds."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise ValueError(f"expected an integer, got '{text}'") from None
        _check_bounds(value, minimum, maximum)
        return value

    return Kind("INTEGER", parse)


def number(minimum: float | None = None, maximum: float | None = None) -> Kind:
    """Return the kind of a flag whose value is a finite decimal number within the bounds."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise ValueError(f"expected a number, got '{text}'") from None
        if not math.isfinite(value):
            raise ValueError(f"expected a finite number, got '{text}'")
        _check_bounds(value, minimum, maximum)
        return value

    return Kind("NUMBER", parse)


def _check_bounds(value: float, minimum: float | None, maximum: float | None) -> None:
    if not (minimum is None or value >= minimum):
        raise ValueError(f"expected at least {minimum}, got {value}")
    if not (maximum is None or value <= maximum):
        raise ValueError(f"expected at most {maximum}, got {value}")


def _boolean(text: str) -> bool:
    lower = text.lower()
    if lower in ("true", "on", "1"):
        return True
    if lower in ("false", "off", "0"):
        return False
    raise ValueError(f"expected true or false, got '{text}'")


def _level(text: str) -> int:
    return int(_boolean(text)) if text.lower() in ("true", "false") else integer(0).parse(text)


def _object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ValueError(f"expected a JSON object: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"expected a JSON object, got '{text}'")
    return value


TEXT = Kind("TEXT", str)
PATH = Kind("PATH", Path)
PATH_OR_URI = Kind("PATH|URI", lambda text: text if "://" in text else Path(text))
INTEGER = integer()
NUMBER = number()
PORT = integer(0, 65535)
BOOLEAN = Kind("true|false", _boolean)
SWITCH = Kind("", _boolean, bare=True)
JSON_OBJECT = Kind("JSON", _object)
LEVEL = Kind("LEVEL", _level)
"""An integer of at least 0; true is 1 and false is 0."""

_KINDS = {bool: BOOLEAN, int: INTEGER, float: NUMBER, str: TEXT, Path: PATH, dict: JSON_OBJECT}


@dataclass(frozen=True, slots=True)
class Flag:
    """A command-line option `--name=VALUE`.

    - kind: type of the value; by default the type of the annotated field
    - default: by default the default of the annotated field
    - default_text: text shown instead of the default
    - repeated: can be given several times, and its value is a list; true for fields that are tuples or lists
    - topic: heading in the help and the docs; by default the topic of the class
    - fallback: name of the flag whose value is used when this flag is not given
    - convert: converts the value of the flag to the value of the field; can raise `ServerError`
    - ignored: reason why an option of tritonserver has no effect; it is accepted with a warning
    """

    name: str
    help: str
    kind: Kind = TEXT
    default: Any = None
    default_text: str = ""
    metavar: str = ""
    aliases: tuple[str, ...] = ()
    repeated: bool = False
    topic: str = ""
    fallback: str = ""
    convert: Callable[[Any], Any] | None = None
    ignored: str = ""

    @property
    def option(self) -> str:
        """The flag as written on the command line."""
        return f"--{self.name}"

    @property
    def options(self) -> tuple[str, ...]:
        """The flag and its aliases, as written on the command line."""
        return (self.option, *(f"--{alias}" for alias in self.aliases))

    @property
    def value_name(self) -> str:
        """Placeholder of the value in the help; "" if the flag takes no value."""
        return self.metavar or self.kind.metavar

    @property
    def description(self) -> str:
        """Help text with the default and remarks."""
        text = self.help
        if self.repeated:
            text += " May be given several times."
        default = self.default_text or ("" if self.default is None else self.kind.format(self.default))
        if default and not self.kind.bare:
            text += f" Default: {default}."
        if self.ignored:
            text += f" Without effect: {self.ignored}."
        return text


@dataclass(frozen=True, slots=True)
class SameAs:
    """Annotation of a field that has the value of a flag declared elsewhere."""

    name: str


@dataclass(frozen=True, slots=True)
class FlagGroup:
    """Annotation of a field whose value is created by `make`, a class or function with flags on its parameters."""

    make: Callable[..., Any]
    topic: str = ""


Declaration = Flag | SameAs | FlagGroup


def declarations(make: Callable[..., Any]) -> dict[str, Declaration]:
    """Return the flags of a class or function by field or parameter, completed with its type and default."""
    names = _TypeNames(vars(builtins) | vars(sys.modules[make.__module__]))
    hints = get_type_hints(make, localns=names, include_extras=True)
    defaults = _defaults(make)
    found: dict[str, Declaration] = {}
    for name, hint in hints.items():
        if get_origin(hint) is Annotated:
            kind, *extras = get_args(hint)
            for extra in extras:
                if isinstance(extra, Flag):
                    found[name] = completed(extra, kind, defaults.get(name))
                elif isinstance(extra, SameAs | FlagGroup):
                    found[name] = extra
    return found


def flags_of(make: Callable[..., Any], topic: str = "") -> Iterator[Flag]:
    """Yield the flags of a class or function and of its groups, in declaration order; `topic` is the default topic."""
    for declaration in declarations(make).values():
        if isinstance(declaration, FlagGroup):
            yield from flags_of(declaration.make, declaration.topic or topic)
        elif isinstance(declaration, Flag):
            yield replace(declaration, topic=declaration.topic or topic)


class _TypeNames(dict[str, Any]):
    """Names used in annotations. Names imported only for type checking resolve to `Any`."""

    def __missing__(self, name: str) -> Any:
        return Any


def _defaults(make: Callable[..., Any]) -> dict[str, Any]:
    if dataclasses.is_dataclass(make):
        return {
            field.name: field.default for field in dataclasses.fields(make) if field.default is not MISSING
        }
    parameters = inspect.signature(make).parameters.values()
    return {one.name: one.default for one in parameters if one.default is not one.empty}


def completed(flag: Flag, hint: Any, default: Any) -> Flag:
    """Return the flag with the type `hint` and the default of its field, where the flag has none of its own."""
    if flag.convert is not None:
        return flag
    if get_origin(hint) in (Union, types.UnionType):
        hint = next(one for one in get_args(hint) if one is not type(None))
    origin = get_origin(hint)
    repeated = flag.repeated or origin in (list, tuple)
    if repeated:
        hint = get_args(hint)[0]
    elif flag.default is None and not flag.fallback:
        flag = replace(flag, default=default)
    if flag.kind is TEXT:
        if isinstance(hint, type) and issubclass(hint, Enum):
            kind = _choice({member.value: member for member in hint})
        else:
            kind = _KINDS.get(get_origin(hint) or hint, TEXT)
        flag = replace(flag, kind=kind)
    return replace(flag, repeated=repeated)

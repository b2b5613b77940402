"""The file of --config: YAML whose keys are the names of the options."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from neso.cli.options.errors import OptionError


@dataclass(frozen=True, slots=True)
class Entry:
    """A key of the file with its values as text, as they would stand on the command line.

    `origin` is "FILE:LINE: KEY", for messages. `is_list`: whether the file has a list.
    """

    key: str
    values: list[str]
    origin: str
    is_list: bool


def read_config(path: Path) -> list[Entry]:
    """The entries of the file, in its order. Raises `OptionError` that names file and line."""
    import yaml

    try:
        document = yaml.compose(path.read_bytes(), Loader=yaml.SafeLoader)
    except OSError as error:
        raise OptionError(f"--config: cannot read '{path}': {error.strerror}") from None
    except yaml.YAMLError as error:
        raise OptionError(f"{path}:{_line(error)}: {_problem(error)}") from None
    if document is None:  # an empty file
        return []
    if not isinstance(document, yaml.MappingNode):
        raise OptionError(
            f"{path}:{document.start_mark.line + 1}: expected lines of the form 'option: value'"
        )
    return list(_entries(path, document))


def _entries(path: Path, document: object) -> Iterator[Entry]:
    import yaml

    assert isinstance(document, yaml.MappingNode)
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
        values = [_text(path, key.value, node) for node in (value.value if is_list else [value])]
        yield Entry(key.value, values, origin, is_list)


def _text(path: Path, key: str, node: object) -> str:
    import yaml

    if not isinstance(node, yaml.ScalarNode) or node.tag == "tag:yaml.org,2002:null":
        line = node.start_mark.line + 1  # type: ignore[attr-defined]
        raise OptionError(f"{path}:{line}: {key}: expected a value or a list of values")
    return str(node.value)


def _line(error: Exception) -> int:
    mark = getattr(error, "problem_mark", None)
    return mark.line + 1 if mark is not None else 1


def _problem(error: Exception) -> str:
    return getattr(error, "problem", None) or str(error)

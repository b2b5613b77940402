"""Mapping of configured inputs to program arguments, and of results to outputs.

Triton's naming conventions: names end with `__<index>`, or are argument names of `forward` (inputs only). Otherwise the
order in the configuration is used.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from neso.backends.pytorch.program import Argument
from neso.backends.tensor.model import server_inputs
from neso.server.errors import InvalidArgument

_INDEXED = re.compile(r".+__(\d+)")


def find_arguments(config: Any, arguments: list[Argument] | None) -> dict[str, str]:
    """Return the argument name (or dictionary key) by input name, including inputs provided by the server.

    Raises `InvalidArgument` if inputs and arguments do not match.
    """
    names = [tensor.name for tensor in config.input]
    added = server_inputs(config)
    if not names + added:
        raise InvalidArgument("model configuration must contain at least one input, none were specified.")
    if arguments is None:
        return {name: name for name in names + added}
    _check_count(config, len(names + added), arguments)
    known = [argument.name for argument in arguments]
    if all(name in known for name in names + added):
        found = {name: name for name in names + added}
    else:
        positions = _positions(names) | {name: _index(name) for name in added}
        found = {}
        for name, position in positions.items():
            if position >= len(known):
                raise InvalidArgument(
                    f"input '{name}' of model '{config.name}' is argument {position} of forward, which has "
                    f"{len(known)}: {', '.join(known)}"
                )
            found[name] = known[position]
    _check_all_given(config, found, arguments)
    return found


def find_results(config: Any) -> dict[str, int]:
    """Return the result position by output name, including implicit states. Raises `InvalidArgument`."""
    names = [tensor.name for tensor in config.output]
    if not names:
        raise InvalidArgument("model configuration must contain at least one output, none were specified.")
    positions = _positions(names)
    for state in config.sequence_batching.state:
        if state.output_name not in positions:
            positions[state.output_name] = _index(state.output_name, "output")
    return positions


def _positions(names: Sequence[str]) -> dict[str, int]:
    if all(_INDEXED.fullmatch(name) for name in names):
        return {name: _index(name) for name in names}
    return {name: position for position, name in enumerate(names)}


def _index(name: str, kind: str = "input") -> int:
    match = _INDEXED.fullmatch(name)
    if match is None:
        raise InvalidArgument(f"{kind} '{name}' does not follow <name>__<index> naming convention.")
    return int(match[1])


def _check_count(config: Any, given: int, arguments: list[Argument]) -> None:
    required = sum(argument.required for argument in arguments)
    if not required <= given <= len(arguments):
        raise InvalidArgument(
            f"unable to load model '{config.name}', configuration expects {given} inputs, model provides "
            f"{len(arguments)}: {', '.join(argument.name for argument in arguments)}"
        )


def _check_all_given(config: Any, found: dict[str, str], arguments: list[Argument]) -> None:
    given = list(found.values())
    for argument in arguments:
        if given.count(argument.name) > 1:
            raise InvalidArgument(
                f"more than one input of model '{config.name}' is argument '{argument.name}' of forward"
            )
        if argument.required and argument.name not in given:
            raise InvalidArgument(
                f"no input of model '{config.name}' is argument '{argument.name}' of forward"
            )

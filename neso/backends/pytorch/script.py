"""TorchScript modules: `model.pt`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from neso.backends.pytorch.program import Argument, Program, Value, flatten
from neso.server.errors import InternalError, Unsupported

_IN_PLACE = re.compile(r"\baten::\w*[^_\W]_\(")


class ScriptProgram(Program):
    """A module that `torch.jit.save` has written. Raises `ServerError` for one that cannot be loaded or called."""

    def __init__(self, path: Path, device: torch.device | None) -> None:
        try:
            self._module: Any = torch.jit.load(str(path), map_location=device)
        except (RuntimeError, ValueError) as error:
            raise InternalError(f"failed to load TorchScript '{path.name}': {_first_line(error)}") from None
        self._module.eval()
        schema = self._module.forward.schema.arguments[1:]  # without self
        self.arguments = None
        if [argument.type.kind() for argument in schema] != ["DictType"]:
            self.arguments = [_argument(argument) for argument in schema]
        self.writes_inputs = _IN_PLACE.search(str(self._module.inlined_graph)) is not None

    def __call__(self, values: Mapping[str, Value]) -> list[Value] | dict[str, Value]:
        if self.arguments is None:
            result = self._module(dict(values))
        else:
            # By position as far as there is no gap: arguments of traced modules may have names that are none.
            ordered = []
            for argument in self.arguments:
                if argument.name not in values:
                    break
                ordered.append(values[argument.name])
            rest = {a.name: values[a.name] for a in self.arguments[len(ordered) :] if a.name in values}
            result = self._module(*ordered, **rest)
        return result if isinstance(result, dict) else flatten(result)


def _argument(argument: Any) -> Argument:
    kind = str(argument.type)
    if kind not in ("Tensor", "Optional[Tensor]", "List[str]"):
        raise Unsupported(
            f"An input of type '{kind}' was detected in the model. Only a single input of type Dict(str, Tensor) or "
            "input(s) of type Tensor are supported."
        )
    return Argument(argument.name, kind == "List[str]", not argument.has_default_value())


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0]

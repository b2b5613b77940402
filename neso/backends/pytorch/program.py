"""PyTorch programs: TorchScript modules (`model.pt`) and exported programs (`model.pt2`)."""

from __future__ import annotations

import re
import warnings
import zipfile
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.export import passes
from torch.utils import _pytree as pytree

from neso.server.errors import InternalError, Unsupported
from neso.server.tensor import DataType, Tensor

Value = Any
"""A `torch.Tensor`, or a list of `str`."""


@dataclass(frozen=True, slots=True)
class Argument:
    """An argument of a program. `required`: it has no default value."""

    name: str
    required: bool = True


class Program(ABC):
    """A callable program.

    - arguments: in the order of the call; None for a program with one dictionary argument
    - writes_inputs: whether it has in-place operations, which can modify its inputs
    """

    arguments: list[Argument] | None
    writes_inputs: bool

    @abstractmethod
    def __call__(self, values: Mapping[str, Value]) -> list[Value] | dict[str, Value]:
        """Run with values by argument name (or dictionary key). Returns results in order, or by name."""


def flatten(result: Any) -> list[Value]:
    """Flatten nested tuples and lists of tensors and lists of strings."""
    if isinstance(result, tuple):
        return [value for element in result for value in flatten(element)]
    if isinstance(result, list) and not all(isinstance(element, str) for element in result):
        return [value for element in result for value in flatten(element)]
    return [result]


_SCRIPT_IN_PLACE = re.compile(r"\baten::\w*[^_\W]_\(")


class ScriptProgram(Program):
    """A module saved by `torch.jit.save`. Raises `ServerError` if it cannot be loaded or its types are unsupported."""

    def __init__(self, path: Path, device: torch.device | None) -> None:
        try:
            self._module: Any = torch.jit.load(str(path), map_location=device)
        except (RuntimeError, ValueError) as error:
            raise InternalError(f"failed to load TorchScript '{path.name}': {_first_line(error)}") from None
        self._module.eval()
        schema = self._module.forward.schema.arguments[1:]  # without self
        self.arguments = None
        if [argument.type.kind() for argument in schema] != ["DictType"]:
            self.arguments = [_script_argument(argument) for argument in schema]
        self.writes_inputs = _SCRIPT_IN_PLACE.search(str(self._module.inlined_graph)) is not None

    def __call__(self, values: Mapping[str, Value]) -> list[Value] | dict[str, Value]:
        if self.arguments is None:
            result = self._module(dict(values))
        else:
            # Positional up to the first gap: argument names of traced modules can be invalid as keywords.
            ordered = []
            for argument in self.arguments:
                if argument.name not in values:
                    break
                ordered.append(values[argument.name])
            rest = {a.name: values[a.name] for a in self.arguments[len(ordered) :] if a.name in values}
            result = self._module(*ordered, **rest)
        return result if isinstance(result, dict) else flatten(result)


def _script_argument(argument: Any) -> Argument:
    kind = str(argument.type)
    if kind not in ("Tensor", "Optional[Tensor]", "List[str]"):
        raise Unsupported(
            f"An input of type '{kind}' was detected in the model. Only a single input of type Dict(str, Tensor) or "
            "input(s) of type Tensor are supported."
        )
    return Argument(argument.name, not argument.has_default_value())


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0]


_EXPORTED_IN_PLACE = re.compile(r"\bops\.\w+\.\w*[^_\W]_\.")


class ExportedProgram(Program):
    """A program saved by `torch.export.save`. Raises `ServerError` if it cannot be loaded.

    Nested arguments are flattened. Dictionary values are named by their keys, other values by their names in the graph.
    """

    def __init__(self, path: Path, device: torch.device | None) -> None:
        _check_archive(path)
        try:
            program = torch.export.load(str(path))
            if device is not None and device.type != "cpu":
                program = passes.move_to_device_pass(program, device)
        except Exception as error:  # torch.export raises various types
            raise InternalError(f"failed to load exported program '{path.name}': {error}") from None
        self._module = program.module()
        self._in_spec = program.call_spec.in_spec
        out_spec: Any = program.call_spec.out_spec
        self._out_keys: list[str] | None = None
        if out_spec.type is dict and out_spec.num_leaves == out_spec.num_children:
            self._out_keys = [str(key) for key in out_spec.context]
        self._names = _input_names(program)
        self.arguments = [Argument(name) for name in self._names]
        self.writes_inputs = _EXPORTED_IN_PLACE.search(str(program.graph)) is not None

    def __call__(self, values: Mapping[str, Value]) -> list[Value] | dict[str, Value]:
        arguments, named = pytree.tree_unflatten([values[name] for name in self._names], self._in_spec)
        results = pytree.tree_leaves(self._module(*arguments, **named))
        return results if self._out_keys is None else dict(zip(self._out_keys, results, strict=True))


def _input_names(program: torch.export.ExportedProgram) -> list[str]:
    inputs = program.graph_signature.user_inputs
    for value in inputs:
        if not isinstance(value, str):
            raise Unsupported(
                f"the program was exported with the constant {value!r} as an input, expected tensors"
            )
    leaves = pytree.tree_unflatten(list(range(len(inputs))), program.call_spec.in_spec)
    names = []
    for (path, _), name in zip(pytree.tree_flatten_with_path(leaves)[0], inputs, strict=True):
        last = path[-1]
        names.append(str(last.key) if isinstance(last, pytree.MappingKey) else str(name))
    return names


def _check_archive(path: Path) -> None:
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
    except (OSError, zipfile.BadZipFile) as error:
        raise InternalError(f"failed to load exported program '{path.name}': {error}") from None
    if any("/aotinductor/" in name for name in names):
        raise Unsupported(
            f"'{path.name}' is an AOTInductor package, which is not supported; save the program by torch.export.save"
        )


# Request arrays are read-only, but torch tensors cannot be. Programs that write to their inputs get copies.
warnings.filterwarnings("ignore", message="The given NumPy array is not writable")


def to_torch(array: npt.NDArray[Any], device: torch.device, *, copy: bool) -> torch.Tensor:
    """Convert to a tensor on `device`. On the CPU, it shares the array's memory unless `copy` is true."""
    if copy:
        array = array.copy()
    if array.dtype == DataType.BF16.dtype:
        tensor = torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    else:
        tensor = torch.from_numpy(array)
    return tensor.to(device)


def to_strings(name: str, array: npt.NDArray[Any]) -> list[str]:
    """Decode a one-dimensional BYTES tensor. Raises `InvalidArgument` if it is not UTF-8."""
    return Tensor(name, DataType.BYTES, array).strings()


def to_numpy(value: torch.Tensor | list[str]) -> npt.NDArray[Any]:
    """Convert a result; a CPU tensor shares its memory."""
    if isinstance(value, list):
        array = np.empty(len(value), np.object_)
        array[:] = value
        return array
    tensor = value.detach().cpu().contiguous().resolve_conj().resolve_neg()
    if tensor.dtype is torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(DataType.BF16.dtype)
    return tensor.numpy()

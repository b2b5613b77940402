"""Programs of `torch.export`: `model.pt2`."""

from __future__ import annotations

import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.export import passes
from torch.utils import _pytree as pytree

from neso.backends.pytorch.program import Argument, Program, Value
from neso.server.errors import InternalError, Unsupported

_IN_PLACE = re.compile(r"\bops\.\w+\.\w*[^_\W]_\.")


class ExportedProgram(Program):
    """A program that `torch.export.save` has written. Raises `ServerError` for one that cannot be loaded.

    Structures of arguments are taken apart: what is in a dictionary goes by its key, anything else by the name
    that the export gave it.
    """

    def __init__(self, path: Path, device: torch.device | None) -> None:
        _check_archive(path)
        try:
            program = torch.export.load(str(path))
            if device is not None and device.type != "cpu":
                program = passes.move_to_device_pass(program, device)
        except Exception as error:  # of many kinds
            raise InternalError(f"failed to load exported program '{path.name}': {error}") from None
        self._module = program.module()
        self._in_spec = program.call_spec.in_spec
        out_spec: Any = program.call_spec.out_spec
        self._out_keys: list[str] | None = None
        if out_spec.type is dict and out_spec.num_leaves == out_spec.num_children:
            self._out_keys = [str(key) for key in out_spec.context]
        self._names = _names(program)
        self.arguments = [Argument(name) for name in self._names]
        self.writes_inputs = _IN_PLACE.search(str(program.graph)) is not None

    def __call__(self, values: Mapping[str, Value]) -> list[Value] | dict[str, Value]:
        arguments, named = pytree.tree_unflatten([values[name] for name in self._names], self._in_spec)
        results = pytree.tree_leaves(self._module(*arguments, **named))
        return results if self._out_keys is None else dict(zip(self._out_keys, results, strict=True))


def _names(program: torch.export.ExportedProgram) -> list[str]:
    given = program.graph_signature.user_inputs
    for value in given:
        if not isinstance(value, str):
            raise Unsupported(
                f"the program was exported with the constant {value!r} as an input, expected tensors"
            )
    leaves = pytree.tree_unflatten(list(range(len(given))), program.call_spec.in_spec)
    names = []
    for (path, _), name in zip(pytree.tree_flatten_with_path(leaves)[0], given, strict=True):
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

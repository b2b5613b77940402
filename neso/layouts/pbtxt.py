"""Write parts of config.pbtxt in an editable form: one line per tensor."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from neso.backends.request_tensors import TensorField


@dataclass(frozen=True, slots=True)
class EnsembleStep:
    """One step of an ensemble. `inputs`, `outputs`: the model's tensor name -> the ensemble's tensor name."""

    model: str
    inputs: Mapping[str, str]
    outputs: Mapping[str, str]

    def __str__(self) -> str:
        maps = [("input_map", *pair) for pair in self.inputs.items()]
        maps += [("output_map", *pair) for pair in self.outputs.items()]
        lines = [f"model_name: {quoted(self.model)}", "model_version: -1"]
        lines += [f"{kind} {{ key: {quoted(key)} value: {quoted(value)} }}" for kind, key, value in maps]
        return "{\n" + "".join(f"      {line}\n" for line in lines) + "    }"


def quoted(text: str) -> str:
    """Return a string literal of the protobuf text format."""
    return json.dumps(text, ensure_ascii=False)


def boolean(value: bool) -> str:
    """Return a boolean literal of the protobuf text format."""
    return "true" if value else "false"


def tensors(kind: str, fields: Iterable[TensorField], *, batches: bool = True) -> str:
    """Format the field `input` or `output` (`kind`). `batches`: the model has a batch dimension."""
    return f"{kind} [\n" + ",\n".join(f"  {_tensor(field, batches)}" for field in fields) + "\n]\n"


def _tensor(field: TensorField, batches: bool) -> str:
    parts = [f"name: {quoted(field.name)}", f"data_type: {field.data_type}"]
    parts.append(f"dims: [ {', '.join(map(str, field.dims))} ]")
    if field.scalar and batches:
        parts.append("reshape { shape: [ ] }")
    if field.optional:
        parts.append("optional: true")
    if field.ragged and batches:
        parts.append("allow_ragged_batch: true")
    return f"{{ {' '.join(parts)} }}"


def ensemble_scheduling(steps: Iterable[EnsembleStep]) -> str:
    """Format the field `ensemble_scheduling`."""
    return "ensemble_scheduling {\n  step [\n    " + ",\n    ".join(map(str, steps)) + "\n  ]\n}\n"


def parameters(values: Mapping[str, str]) -> str:
    """Format the field `parameters`, one entry per line."""
    return "".join(
        f"parameters {{ key: {quoted(key)} value {{ string_value: {quoted(value)} }} }}\n"
        for key, value in values.items()
    )


def instances(count: int) -> str:
    """Format the field `instance_group`: `count` CPU instances."""
    return f"instance_group [ {{ count: {count} kind: KIND_CPU }} ]\n"


def decoupled(value: bool) -> str:
    """Format the field `model_transaction_policy`."""
    return f"model_transaction_policy {{ decoupled: {boolean(value)} }}\n"

"""The inputs and outputs that a backend adds to the configurations of its models."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class TensorField:
    """One input or output. `data_type` as in config.pbtxt; `dims` are without the batch dimension.

    `optional`: an input that may be left out. Where there is a batch dimension: `scalar` is one element, whose
    dimension the backend does not see (`reshape { shape: [ ] }`); requests of one batch may differ in the extent of
    what is `ragged`.
    """

    name: str
    data_type: str
    dims: tuple[int, ...] = (1,)
    optional: bool = False
    scalar: bool = False
    ragged: bool = False


def add_inputs(config: Any, fields: Iterable[TensorField]) -> None:
    """Add those whose names a `ModelConfig` does not have."""
    for field in _missing(config, fields):
        tensor = _add(config.input, field)
        tensor.optional = field.optional
        if config.max_batch_size:
            tensor.allow_ragged_batch = field.ragged
            if field.scalar:
                tensor.reshape.SetInParent()


def add_outputs(config: Any, fields: Iterable[TensorField]) -> None:
    """The same for outputs."""
    for field in _missing(config, fields):
        _add(config.output, field)


def _missing(config: Any, fields: Iterable[TensorField]) -> list[TensorField]:
    named = {tensor.name for tensor in (*config.input, *config.output)}
    return [field for field in fields if field.name not in named]


def _add(tensors: Any, field: TensorField) -> Any:
    from tritonclient.grpc import model_config_pb2 as pb

    return tensors.add(name=field.name, data_type=pb.DataType.Value(field.data_type), dims=field.dims)

"""Messages from rank 0 to the other ranks: plans and changes of adapters, as msgpack with raw arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from functools import cache
from typing import Any

import ml_dtypes  # noqa: F401  # registers the dtype bfloat16
import msgspec
import numpy as np
import numpy.typing as npt

from neso.engine.core.step_plan import PlanPart, StepPlan
from neso.engine.lora.adapter import LoraAdapter, LowRank


@cache
def _dtype_name(dtype: np.dtype[Any]) -> str:
    return dtype.name  # numpy composes it in each call


class PackedArray(msgspec.Struct, frozen=True, array_like=True):
    """An array: dtype name, shape, bytes."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes

    @classmethod
    def pack(cls, array: npt.NDArray[Any]) -> PackedArray:
        return cls(_dtype_name(array.dtype), array.shape, array.tobytes())

    def unpack(self) -> npt.NDArray[Any]:
        return np.frombuffer(self.data, self.dtype).reshape(self.shape)


class AllocateCache(msgspec.Struct, frozen=True, tag="cache", array_like=True):
    """Allocate the KV cache; the numbers of `CacheLayout`."""

    num_blocks: int
    block_size: int
    num_host_blocks: int
    max_num_seqs: int


class RunStep(msgspec.Struct, frozen=True, tag="step", array_like=True):
    """Run a step. `parts`: arrays of each plan part by the index of its class in `kinds`."""

    step: int
    arrays: list[PackedArray]
    parts: dict[int, list[PackedArray]]


class SetAdapter(msgspec.Struct, frozen=True, tag="adapter", array_like=True):
    """Set or remove the adapter of a slot: by layer and target, the matrices and the scale of each update."""

    slot: int
    layers: list[dict[str, tuple[PackedArray, PackedArray, float]]] | None


class Stop(msgspec.Struct, frozen=True, tag="stop", array_like=True):
    """End the rank."""


RankCommand = AllocateCache | RunStep | SetAdapter | Stop

_encode = msgspec.msgpack.Encoder().encode
_decoder: msgspec.msgpack.Decoder[RankCommand] = msgspec.msgpack.Decoder(RankCommand)
_ARRAYS = [entry.name for entry in fields(StepPlan) if entry.name not in ("step", "parts")]


class PlanCodec:
    """Encodes and decodes commands. `kinds`: the classes of plan parts, in the same order on all ranks."""

    def __init__(self, kinds: Sequence[type[PlanPart]]) -> None:
        self._kinds = list(kinds)
        self._fields = {kind: [entry.name for entry in fields(kind)] for kind in kinds}
        self._indices = {kind: index for index, kind in enumerate(kinds)}

    def encode(self, command: RankCommand) -> bytes:
        return _encode(command)

    def decode(self, message: bytes) -> RankCommand:
        """Raises `msgspec.MsgspecError`."""
        return _decoder.decode(message)

    def pack_plan(self, plan: StepPlan) -> RunStep:
        arrays = [PackedArray.pack(getattr(plan, name)) for name in _ARRAYS]
        parts = {
            self._indices[kind]: [PackedArray.pack(getattr(part, name)) for name in self._fields[kind]]
            for kind, part in plan.parts.items()
        }
        return RunStep(plan.step, arrays, parts)

    def unpack_plan(self, command: RunStep) -> StepPlan:
        arrays = {name: array.unpack() for name, array in zip(_ARRAYS, command.arrays, strict=True)}
        parts = {
            self._kinds[index]: self._kinds[index](*(value.unpack() for value in values))
            for index, values in command.parts.items()
        }
        return StepPlan(command.step, **arrays, parts=parts)


def pack_adapter(slot: int, adapter: LoraAdapter | None) -> SetAdapter:
    """Return the command that sets the adapter of a slot."""
    if adapter is None:
        return SetAdapter(slot, None)
    layers = [
        {
            target: (PackedArray.pack(change.a), PackedArray.pack(change.b), change.scale)
            for target, change in layer.items()
        }
        for layer in adapter.layers
    ]
    return SetAdapter(slot, layers)  # type: ignore[arg-type]


def unpack_adapter(command: SetAdapter) -> LoraAdapter | None:
    """Return the adapter of the command; None if the slot becomes empty."""
    if command.layers is None:
        return None
    layers = tuple(
        {target: LowRank(a.unpack(), b.unpack(), scale) for target, (a, b, scale) in layer.items()}
        for layer in command.layers
    )
    return LoraAdapter(layers)  # type: ignore[arg-type]

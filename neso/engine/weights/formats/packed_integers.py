"""GPTQ and AWQ: integers packed into int32 words, with zero points and float16 scales for groups of inputs.

For a layer `X` the checkpoint has X.qweight, X.qzeros, X.scales and, for GPTQ, maybe X.g_idx, instead of X.weight:

    GPTQ  qweight int32[inputs / n, outputs]   n = 32 / bits inputs a word, the first in the lowest bits
          qzeros  int32[groups, outputs / n]   stored minus one, but for "checkpoint_format": "gptq_v2"
          g_idx   int32[inputs]                the group of each input; out of order with "desc_act"
    AWQ   qweight int32[inputs, outputs / 8]   8 outputs a word, in the order 0, 2, 4, 6, 1, 3, 5, 7
          qzeros  int32[groups, outputs / 8]   likewise
    both  scales  float16[groups, outputs]     weight = scale * (code - zero)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from neso.engine.weights.errors import CheckpointError
from neso.engine.weights.formats.format import StoredTensors
from neso.engine.weights.quantized_matrix import QuantizedMatrix

_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass(frozen=True, slots=True)
class PackedFormat:
    """What `quantization_config` says. `group_size` -1: one group for all inputs."""

    method: str
    bits: int
    group_size: int
    zeros_minus_one: bool

    METHODS: ClassVar[tuple[str, ...]] = ("gptq", "awq")

    @classmethod
    def of(cls, method: str, quantization: dict[str, Any], where: str) -> PackedFormat:
        """By a `quantization_config` whose method is one of `METHODS`.

        Raises `CheckpointError` for a number of bits, a version or a group size that is not supported.
        """
        bits, group_size = quantization.get("bits"), quantization.get("group_size", -1)
        supported = (4, 8) if method == "gptq" else (4,)
        if type(bits) is not int or bits not in supported:
            raise CheckpointError(
                f"{where}: quantization_config.bits {bits!r} is not supported with {method}; {supported} are"
            )
        if method == "awq" and str(quantization.get("version", "gemm")).lower() != "gemm":
            raise CheckpointError(
                f"{where}: quantization_config.version {quantization['version']!r} is not supported; gemm is"
            )
        if type(group_size) is not int or not (group_size == -1 or (group_size > 0 and group_size % 32 == 0)):
            raise CheckpointError(
                f"{where}: quantization_config.group_size must be -1 or a multiple of 32, not {group_size!r}"
            )
        old = method == "gptq" and quantization.get("checkpoint_format", "gptq") != "gptq_v2"
        return cls(method, bits, group_size, old)

    def holds(self, tensors: StoredTensors, name: str) -> bool:
        return not tensors.stores(name) and tensors.stores(name.removesuffix(".weight") + ".qweight")

    def read(self, tensors: StoredTensors, name: str, shape: tuple[int, int]) -> QuantizedMatrix:
        """The weights, [outputs, inputs]. Raises `CheckpointError` for shapes that do not fit."""
        layer = name.removesuffix(".weight")
        outputs, inputs = shape
        size = inputs if self.group_size == -1 else self.group_size
        groups = -(-inputs // size)
        words = 32 // self.bits

        def tensor(name: str, expected: tuple[int, ...]) -> npt.NDArray[Any]:
            found = np.require(tensors.stored(f"{layer}.{name}"), requirements="A")
            if found.shape != expected:
                raise CheckpointError(
                    f"tensor '{layer}.{name}' has the shape {list(found.shape)}, but {self.method} with "
                    f"{self.bits} bits in groups of {size} needs {list(expected)}"
                )
            return found

        if self.method == "gptq":
            packed = tensor("qweight", (inputs // words, outputs))
            codes = _unpack(np.ascontiguousarray(packed.T), self.bits, range(words))
        else:
            packed = tensor("qweight", (inputs, outputs // words))
            codes = np.ascontiguousarray(_unpack(packed, self.bits, _AWQ_ORDER).T)
        order = range(words) if self.method == "gptq" else _AWQ_ORDER
        zeros = _unpack(tensor("qzeros", (groups, outputs // words)), self.bits, order).T.astype(np.float32)
        scales = np.ascontiguousarray(tensor("scales", (groups, outputs)).T.astype(np.float32))
        input_order = self._input_order(tensors, layer, inputs, size)
        if input_order is not None:
            codes = np.ascontiguousarray(codes[:, input_order])
        return QuantizedMatrix(
            codes=codes,
            scales=scales,
            offsets=-scales * (zeros + np.float32(self.zeros_minus_one)),
            bits=self.bits,
            group_size=-(-size // 32) * 32,
            input_order=input_order,
        )

    def _input_order(
        self, tensors: StoredTensors, layer: str, inputs: int, size: int
    ) -> npt.NDArray[np.int32] | None:
        """Inputs in the order of their groups; None where they are so already."""
        if self.method != "gptq" or not tensors.stores(f"{layer}.g_idx"):
            return None
        group_of = tensors.stored(f"{layer}.g_idx")
        in_order = np.arange(inputs) // size
        if np.array_equal(group_of, in_order):
            return None
        order = np.argsort(group_of, kind="stable").astype(np.int32)
        if group_of.shape != (inputs,) or not np.array_equal(group_of[order], in_order):
            raise CheckpointError(f"tensor '{layer}.g_idx' does not put {size} inputs into each group")
        return order


def _unpack(packed: npt.NDArray[Any], bits: int, order: Any) -> npt.NDArray[np.uint8]:
    """int32[R, W] -> uint8[R, W * 32 / bits]; value `order[i]` of a word is in its bits from i * bits on."""
    words = packed.view(np.uint32)
    values = np.empty((*packed.shape, 32 // bits), np.uint8)
    for i, place in enumerate(order):
        values[..., place] = (words >> np.uint32(i * bits)) & np.uint32(2**bits - 1)
    return values.reshape(len(packed), -1)

"""Quantized Hugging Face checkpoints: GPTQ and AWQ (packed integers), and float8.

Packed integers. For a layer `X` the checkpoint has X.qweight, X.qzeros, X.scales and, for GPTQ, optionally X.g_idx,
instead of X.weight:

    GPTQ  qweight int32[inputs / n, outputs]   n = 32 / bits inputs per word, the first in the lowest bits
          qzeros  int32[groups, outputs / n]   zero point minus one, except for "checkpoint_format": "gptq_v2"
          g_idx   int32[inputs]                group of each input; not ascending with "desc_act"
    AWQ   qweight int32[inputs, outputs / 8]   8 outputs per word, in the order 0, 2, 4, 6, 1, 3, 5, 7
          qzeros  int32[groups, outputs / 8]   same order
    both  scales  float16[groups, outputs]     weight = scale * (code - zero)

Float8. For a layer `X` of N outputs and K inputs the checkpoint has X.weight float8_e4m3fn[N, K] and

    fp8                 X.weight_scale_inv [ceil(N / bn), ceil(K / bk)] with "weight_block_size": [bn, bk],
                        otherwise one scale, [] or [1], possibly named X.weight_scale
    compressed-tensors  X.weight_scale [] or [1], or [N, 1]
    fbgemm_fp8          X.weight_scale [N, 1]

weight = code * scale in all of them, despite the name "inv". Layers excluded from quantization are dense. Scales of
activations are not read: only the weights are in 8 bits here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol

import ml_dtypes
import numpy as np
import numpy.typing as npt

from neso.engine.weights.quantized import Float8Matrix, QuantizedMatrix, block_grid
from neso.engine.weights.source import CheckpointError, is_float


class StoredTensors(Protocol):
    """Tensors of a checkpoint by their names in its files."""

    def has_stored(self, name: str) -> bool: ...

    def stored_tensor(self, name: str, shape: tuple[int, ...] | None = None) -> npt.NDArray[Any]:
        """Return a read-only view, possibly unaligned.

        Raises `CheckpointError` if it is missing or does not have `shape`.
        """


class QuantizationFormat(Protocol):
    """Reads the quantized matrices of a checkpoint; its other tensors are dense."""

    def is_quantized(self, tensors: StoredTensors, name: str) -> bool:
        """Whether the weights `name` ("X.weight") are quantized in this format."""

    def read(
        self, tensors: StoredTensors, name: str, shape: tuple[int, int]
    ) -> QuantizedMatrix | Float8Matrix:
        """Return quantized weights [outputs, inputs]. Raises `CheckpointError` for tensors of another shape or type."""


_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass(frozen=True, slots=True)
class PackedIntegerFormat:
    """GPTQ or AWQ, described by `quantization_config`. `group_size` -1: one group for all inputs."""

    method: str
    bits: int
    group_size: int
    zeros_minus_one: bool

    METHODS: ClassVar[tuple[str, ...]] = ("gptq", "awq")

    @classmethod
    def from_config(cls, method: str, quantization: dict[str, Any], where: str) -> PackedIntegerFormat:
        """Read the format. Raises `CheckpointError` for an unsupported number of bits, version or group size.

        `where` is prepended to messages.
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

    def is_quantized(self, tensors: StoredTensors, name: str) -> bool:
        return not tensors.has_stored(name) and tensors.has_stored(name.removesuffix(".weight") + ".qweight")

    def read(self, tensors: StoredTensors, name: str, shape: tuple[int, int]) -> QuantizedMatrix:
        """Return the weights [outputs, inputs]. Raises `CheckpointError` for tensors of another shape."""
        layer = name.removesuffix(".weight")
        outputs, inputs = shape
        size = inputs if self.group_size == -1 else self.group_size
        groups = -(-inputs // size)
        words = 32 // self.bits

        def tensor(name: str, expected: tuple[int, ...]) -> npt.NDArray[Any]:
            found = np.require(tensors.stored_tensor(f"{layer}.{name}"), requirements="A")
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
        """Return the inputs sorted by group, int32[inputs]; None if they are already sorted."""
        if self.method != "gptq" or not tensors.has_stored(f"{layer}.g_idx"):
            return None
        group_of = tensors.stored_tensor(f"{layer}.g_idx")
        in_order = np.arange(inputs) // size
        if np.array_equal(group_of, in_order):
            return None
        order = np.argsort(group_of, kind="stable").astype(np.int32)
        if group_of.shape != (inputs,) or not np.array_equal(group_of[order], in_order):
            raise CheckpointError(f"tensor '{layer}.g_idx' does not put {size} inputs into each group")
        return order


def _unpack(packed: npt.NDArray[Any], bits: int, order: Any) -> npt.NDArray[np.uint8]:
    """Convert int32[R, W] to uint8[R, W * 32 / bits]; bits i * bits and up of a word hold value number `order[i]`."""
    words = packed.view(np.uint32)
    values = np.empty((*packed.shape, 32 // bits), np.uint8)
    for i, place in enumerate(order):
        values[..., place] = (words >> np.uint32(i * bits)) & np.uint32(2**bits - 1)
    return values.reshape(len(packed), -1)


Granularity = Literal["tensor", "channel", "block"]

_E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
_E5M2 = np.dtype(ml_dtypes.float8_e5m2)
_CHUNK_BYTES = 1 << 18  # codes that are checked at once; they fit the cache


@dataclass(frozen=True, slots=True)
class Float8Format:
    """Float8 weights, described by `quantization_config`.

    - scale_names: possible suffixes of scale tensors
    - granularity: weights that share a scale: the tensor, an output channel, or a block of `block_size`
    """

    method: str
    scale_names: tuple[str, ...]
    granularity: tuple[Granularity, ...]
    block_size: tuple[int, int] | None = None

    METHODS: ClassVar[tuple[str, ...]] = ("fp8", "compressed-tensors", "fbgemm_fp8")

    @classmethod
    def from_config(cls, method: str, quantization: dict[str, Any], where: str) -> Float8Format:
        """Read the format. Raises `CheckpointError` for an unsupported scheme. `where` is prepended to messages."""
        if method == "compressed-tensors":
            _check_compressed(quantization, where)
            return cls(method, ("weight_scale",), ("tensor", "channel"))
        if method == "fbgemm_fp8":
            return cls(method, ("weight_scale",), ("channel",))
        names = ("weight_scale_inv", "weight_scale")
        size = quantization.get("weight_block_size")
        if size is None:
            return cls(method, names, ("tensor",))
        if not isinstance(size, list) or len(size) != 2 or any(type(n) is not int or n < 1 for n in size):
            raise CheckpointError(
                f"{where}: quantization_config.weight_block_size must be two integers above zero, not {size!r}"
            )
        return cls(method, names, ("block",), (size[0], size[1]))

    def is_quantized(self, tensors: StoredTensors, name: str) -> bool:
        # Decide by dtype, because the config's list of excluded modules has patterns whose syntax differs between
        # tools.
        return tensors.has_stored(name) and tensors.stored_tensor(name).dtype in (_E4M3, _E5M2)

    def read(self, tensors: StoredTensors, name: str, shape: tuple[int, int]) -> Float8Matrix:
        """Return the weights [outputs, inputs].

        Raises `CheckpointError` for another shape, for float8_e5m2, for weights that are NaN (kernels for GPUs decode
        finite numbers only), and for missing scales or scales of another shape.
        """
        codes = tensors.stored_tensor(name, shape)
        if codes.dtype != _E4M3:
            raise CheckpointError(f"tensor {name!r} has the type {codes.dtype}; only {_E4M3} is supported")
        if _contains_nan(codes):
            raise CheckpointError(f"tensor {name!r} contains weights that are NaN")
        scale_name, stored = self._stored_scales(tensors, name)
        blocks = [self._block(granularity, shape) for granularity in self.granularity]
        for block in blocks:
            scales_shape = block_grid(shape, block)
            if stored.shape == scales_shape or (scales_shape == (1, 1) and stored.shape in ((), (1,))):
                return Float8Matrix(codes, stored.astype(np.float32).reshape(scales_shape), block)
        expected = " or ".join(
            "[1]" if block == shape else str([*block_grid(shape, block)]) for block in blocks
        )
        raise CheckpointError(
            f"tensor {scale_name!r} has the shape {[*stored.shape]}, but {self.method} weights of {[*shape]} "
            f"need {expected}"
        )

    def _stored_scales(self, tensors: StoredTensors, name: str) -> tuple[str, npt.NDArray[Any]]:
        """Return name and values of the scale tensor."""
        layer = name.removesuffix(".weight")
        candidates = [f"{layer}.{scale}" for scale in self.scale_names]
        for candidate in candidates:
            if tensors.has_stored(candidate):
                stored = tensors.stored_tensor(candidate)
                if not is_float(stored.dtype):
                    raise CheckpointError(
                        f"tensor {candidate!r} has the type {stored.dtype}; scales must be float32 or bfloat16"
                    )
                return candidate, stored
        raise CheckpointError(
            f"tensor {name!r} is {_E4M3}, but the checkpoint has no scales for it: no "
            + " and no ".join(repr(candidate) for candidate in candidates)
        )

    def _block(self, granularity: Granularity, shape: tuple[int, int]) -> tuple[int, int]:
        if granularity == "channel":
            return 1, shape[1]
        return self.block_size if self.block_size is not None else shape


def _contains_nan(codes: npt.NDArray[Any]) -> bool:
    """Whether one of the codes e4m3[N, K] is NaN: 127 or, with the sign, 255."""
    octets = codes.view(np.uint8)
    rows = max(1, _CHUNK_BYTES // octets.shape[1])
    parts = (octets[start : start + rows] for start in range(0, len(octets), rows))
    return any((part & 127).max() == 127 for part in parts)


def _check_compressed(quantization: dict[str, Any], where: str) -> None:
    """Check that the weights are float8 with a scale per tensor or output. Raises `CheckpointError`."""
    stored = quantization.get("format")
    if stored not in ("float-quantized", "naive-quantized"):
        raise CheckpointError(
            f"{where}: quantization_config.format {stored!r} is not supported with compressed-tensors; "
            "float-quantized and naive-quantized are"
        )
    if quantization.get("transform_config"):
        raise CheckpointError(
            f"{where}: quantization_config.transform_config is not supported (rotated weights)"
        )
    groups = quantization.get("config_groups") or {}
    if not isinstance(groups, dict) or not all(isinstance(group, dict) for group in groups.values()):
        raise CheckpointError(f"{where}: quantization_config.config_groups must hold JSON objects")
    for name, group in groups.items():
        weights = group.get("weights")
        if weights is None:
            continue
        field = f"quantization_config.config_groups.{name}.weights"
        if not isinstance(weights, dict):
            raise CheckpointError(f"{where}: {field} must be a JSON object, not {weights!r}")
        # Defaults are those of the compressed-tensors library.
        for key, default, supported in (
            ("type", "int", ("float",)),
            ("num_bits", 8, (8,)),
            ("symmetric", True, (True,)),
            ("strategy", None, (None, "tensor", "channel")),
        ):
            value = weights.get(key, default)
            if value not in supported:
                raise CheckpointError(
                    f"{where}: {field}.{key} {value!r} is not supported with format {stored}; "
                    + " and ".join(str(item) for item in supported if item is not None)
                    + " would be"
                )


def checkpoint_format(config: dict[str, Any], where: str) -> QuantizationFormat | None:
    """Return the quantization format of a checkpoint with this config.json; None if it is not quantized.

    `where` is prepended to messages. Raises `CheckpointError` for an unsupported format.
    """
    quantization = config.get("quantization_config")
    if not isinstance(quantization, dict):
        return None
    method = str(quantization.get("quant_method", "")).lower()
    if method in PackedIntegerFormat.METHODS:
        return PackedIntegerFormat.from_config(method, quantization, where)
    if method in Float8Format.METHODS:
        return Float8Format.from_config(method, quantization, where)
    supported = ", ".join((*PackedIntegerFormat.METHODS, *Float8Format.METHODS))
    raise CheckpointError(
        f"{where}: quantization_config.quant_method {method!r} is not supported; supported are {supported}"
    )

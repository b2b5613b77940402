"""Checkpoints in float8_e4m3fn, with scales beside the weights.

For a layer `X` of N outputs and K inputs the checkpoint has X.weight float8_e4m3fn[N, K] and

    fp8                 X.weight_scale_inv [ceil(N / bn), ceil(K / bk)] with "weight_block_size": [bn, bk],
                        else one scale, [] or [1], maybe called X.weight_scale
    compressed-tensors  X.weight_scale [] or [1], or [N, 1]
    fbgemm_fp8          X.weight_scale [N, 1]

weight = code * scale in all of them, also where the scale is called "inv". Layers that were left out of the
quantization are dense. Scales of activations are not read: weights alone are in 8 bits here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import ml_dtypes
import numpy as np
import numpy.typing as npt

from neso.engine.weights.dtype import is_float
from neso.engine.weights.errors import CheckpointError
from neso.engine.weights.float8_matrix import Float8Matrix, grid
from neso.engine.weights.formats.format import StoredTensors

Sharing = Literal["tensor", "channel", "block"]

_E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
_E5M2 = np.dtype(ml_dtypes.float8_e5m2)


@dataclass(frozen=True, slots=True)
class Float8Format:
    """What `quantization_config` says.

    - scale_names: what the scales may be called, after the layer's name
    - sharing: which weights may share a scale: all, those of an output, those of a block of `block_size`
    """

    method: str
    scale_names: tuple[str, ...]
    sharing: tuple[Sharing, ...]
    block_size: tuple[int, int] | None = None

    METHODS: ClassVar[tuple[str, ...]] = ("fp8", "compressed-tensors", "fbgemm_fp8")

    @classmethod
    def of(cls, method: str, quantization: dict[str, Any], where: str) -> Float8Format:
        """By a `quantization_config` whose method is one of `METHODS`.

        Raises `CheckpointError` for what is not supported.
        """
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

    def holds(self, tensors: StoredTensors, name: str) -> bool:
        # By the type and not by the config's list of modules left out: that has patterns, and a form for each tool.
        return tensors.stores(name) and tensors.stored(name).dtype in (_E4M3, _E5M2)

    def read(self, tensors: StoredTensors, name: str, shape: tuple[int, int]) -> Float8Matrix:
        """The weights, [outputs, inputs].

        Raises `CheckpointError` for another shape, for float8_e5m2 and for scales that are missing or do not fit.
        """
        codes = tensors.stored(name, shape)
        if codes.dtype != _E4M3:
            raise CheckpointError(f"tensor {name!r} has the type {codes.dtype}; only {_E4M3} is supported")
        scale_name, stored = self._stored_scales(tensors, name)
        blocks = [self._block(sharing, shape) for sharing in self.sharing]
        for block in blocks:
            scales_shape = grid(shape, block)
            if stored.shape == scales_shape or (scales_shape == (1, 1) and stored.shape in ((), (1,))):
                return Float8Matrix(codes, stored.astype(np.float32).reshape(scales_shape), block)
        expected = " or ".join("[1]" if block == shape else str([*grid(shape, block)]) for block in blocks)
        raise CheckpointError(
            f"tensor {scale_name!r} has the shape {[*stored.shape]}, but {self.method} weights of {[*shape]} "
            f"need {expected}"
        )

    def _stored_scales(self, tensors: StoredTensors, name: str) -> tuple[str, npt.NDArray[Any]]:
        """Their name, and as they are in the file."""
        layer = name.removesuffix(".weight")
        candidates = [f"{layer}.{scale}" for scale in self.scale_names]
        for candidate in candidates:
            if tensors.stores(candidate):
                stored = tensors.stored(candidate)
                if not is_float(stored.dtype):
                    raise CheckpointError(
                        f"tensor {candidate!r} has the type {stored.dtype}; scales must be float32 or bfloat16"
                    )
                return candidate, stored
        raise CheckpointError(
            f"tensor {name!r} is {_E4M3}, but the checkpoint has no scales for it: no "
            + " and no ".join(repr(candidate) for candidate in candidates)
        )

    def _block(self, sharing: Sharing, shape: tuple[int, int]) -> tuple[int, int]:
        if sharing == "channel":
            return 1, shape[1]
        return self.block_size if self.block_size is not None else shape


def _check_compressed(quantization: dict[str, Any], where: str) -> None:
    """Raises `CheckpointError` unless the weights are 8-bit floats with a scale for each tensor or output."""
    stored = quantization.get("format")
    if stored not in ("float-quantized", "naive-quantized"):
        raise CheckpointError(
            f"{where}: quantization_config.format {stored!r} is not supported with compressed-tensors; "
            "float-quantized and naive-quantized are"
        )
    if quantization.get("transform_config"):
        raise CheckpointError(
            f"{where}: quantization_config.transform_config is not supported: weights that are rotated"
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
        # What is not given has the default of the compressed-tensors library.
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

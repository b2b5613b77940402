"""Which formats of quantized checkpoints there are."""

from __future__ import annotations

from typing import Any

from neso.engine.weights.errors import CheckpointError
from neso.engine.weights.formats.float8 import Float8Format
from neso.engine.weights.formats.format import Format
from neso.engine.weights.formats.packed_integers import PackedFormat


def checkpoint_format(config: dict[str, Any], where: str) -> Format | None:
    """The format of a checkpoint with this config.json, None where it is not quantized.

    `where` is prepended to messages. Raises `CheckpointError` for what is not supported.
    """
    quantization = config.get("quantization_config")
    if not isinstance(quantization, dict):
        return None
    method = str(quantization.get("quant_method", "")).lower()
    if method in PackedFormat.METHODS:
        return PackedFormat.of(method, quantization, where)
    if method in Float8Format.METHODS:
        return Float8Format.of(method, quantization, where)
    supported = ", ".join((*PackedFormat.METHODS, *Float8Format.METHODS))
    raise CheckpointError(
        f"{where}: quantization_config.quant_method {method!r} is not supported; supported are {supported}"
    )

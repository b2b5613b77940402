"""`neso build --quantization fp8`: a checkpoint whose matrices are 8-bit floats, for GPUs.

Nothing is packed: the result is a Hugging Face checkpoint in the form of FBGEMM, a scale for each output, which other
servers read too. The embedding and the head stay as they are: rounding them costs more than it saves.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from neso.engine.build import Progress, copy_text_files, prepare_target
from neso.engine.runners.base import UnsupportedOption
from neso.engine.specs.decoder_spec import DecoderSpec, TensorPart, all_tensors
from neso.engine.specs.registry import decoder_spec
from neso.engine.weights.checkpoint import SINGLE_FILE, open_source
from neso.engine.weights.engine_directory import CONFIG_FILE, EngineDirectory
from neso.engine.weights.quantized import Float8Matrix, dense
from neso.engine.weights.safetensors_file import SafetensorsWriter
from neso.engine.weights.source import TensorSource

_E4M3_MAX = np.float32(448)
_ENTRY_BYTES = 192
_QUANTIZATION = {"quant_method": "fbgemm_fp8", "modules_to_not_convert": ["lm_head"]}

Tensors = Iterator[tuple[str, npt.NDArray[Any]]]


def build_float8(model: Path, target: Path, progress: Progress = lambda done, total: None) -> None:
    """Write the checkpoint into `target`, which must be empty or not exist.

    `progress` is called with the tensors done, and their number. Raises `CheckpointError`, `UnsupportedModel`,
    `UnsupportedOption`; `FileExistsError` when the target is not empty.
    """
    with open_source(model) as source:
        if isinstance(source, EngineDirectory):
            raise UnsupportedOption(f"{model} is an engine directory already")
        spec = decoder_spec(source.config)
        names = _stored_tensors(spec)
        prepare_target(target)
        with SafetensorsWriter(target / SINGLE_FILE, _ENTRY_BYTES * 2 * len(names)) as writer:
            for done, (name, shape, rounded) in enumerate(names, 1):
                for written, array in _tensors(source, name, shape, rounded):
                    writer.add(written, array)
                progress(done, len(names))
        config = {**source.config, "quantization_config": _QUANTIZATION}
        (target / CONFIG_FILE).write_text(json.dumps(config, indent=1))
    copy_text_files(model, target)


def round_to_float8(weights: npt.NDArray[np.float32]) -> Float8Matrix:
    """float32[N, K] with a scale for each output: the largest weight of it becomes 448."""
    scales = np.maximum(np.abs(weights).max(axis=1, keepdims=True) / _E4M3_MAX, np.float32(1e-12))
    codes = (weights / scales).astype(ml_dtypes.float8_e4m3fn)
    return Float8Matrix(codes, scales, (1, weights.shape[1]))


def _stored_tensors(spec: DecoderSpec) -> list[tuple[str, tuple[int, ...], bool]]:
    """Name and shape of each tensor, and whether it is rounded: the matrices of layers are, but for routers."""
    tensors: dict[str, tuple[tuple[int, ...], bool]] = {}
    for role, layer, expert, shape in all_tensors(spec):
        place = spec.tensor_names[role]
        if isinstance(place, TensorPart):
            if place.transposed:
                raise UnsupportedOption(
                    f"the family {spec.family} stores matrices [inputs, outputs]; fp8 does not"
                )
            shape = (place.outputs, *shape[1:])
        rounded = layer is not None and len(shape) == 2 and not role.endswith("router")
        tensors[spec.tensor_name(role, layer, expert)] = shape, rounded
    return [(name, shape, rounded) for name, (shape, rounded) in tensors.items()]


def _tensors(source: TensorSource, name: str, shape: tuple[int, ...], rounded: bool) -> Tensors:
    """What is written for a weight: itself, or codes and scales."""
    if len(shape) == 1:
        vector = np.empty(shape, np.float32)
        source.read_float32(name, vector)
        yield name, vector.astype(ml_dtypes.bfloat16)
        return
    found = source.matrix(name, (shape[0], shape[1]))
    if not rounded:
        yield name, dense(found).astype(ml_dtypes.bfloat16)
        return
    if isinstance(found, Float8Matrix) and found.output_scales() is not None:
        matrix = found
    else:
        matrix = round_to_float8(dense(found).astype(np.float32))
    scales = matrix.output_scales()
    assert scales is not None
    yield name, matrix.codes
    yield name.removesuffix(".weight") + ".weight_scale", scales[:, None]

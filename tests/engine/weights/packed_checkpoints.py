"""GPTQ and AWQ checkpoints, packed according to the format definitions."""

from __future__ import annotations

import shutil
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
from checkpoints import rewrite_config
from safetensors.numpy import load_file, save_file

SHAPE = {"hidden_size": 64, "intermediate_size": 128}
FORMATS: dict[str, dict[str, Any]] = {
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 32},
    "gptq-8": {"quant_method": "gptq", "bits": 8, "group_size": 32},
    "gptq-one-group": {"quant_method": "gptq", "bits": 4, "group_size": -1},
    "gptq-v2": {"quant_method": "gptq", "bits": 4, "group_size": 32, "checkpoint_format": "gptq_v2"},
    "gptq-act-order": {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"},
}


def pack_words(values: np.ndarray, bits: int, order: list[int]) -> np.ndarray:
    """[R, C] -> int32[R, C * bits / 32]; bits i of a word hold its value order[i]."""
    per_word = 32 // bits
    words = np.zeros((len(values), values.shape[1] // per_word), np.uint32)
    for column in range(values.shape[1]):
        at = order.index(column % per_word)
        words[:, column // per_word] |= values[:, column].astype(np.uint32) << np.uint32(at * bits)
    return words.view(np.int32)


def quantize_layer(
    name: str, weight: np.ndarray, config: dict[str, Any], rng: np.random.Generator
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Tensors of a layer with random zero points, and the dequantized weights."""
    outputs, inputs = weight.shape
    bits, size = config["bits"], config["group_size"] if config["group_size"] > 0 else inputs
    top = 2**bits - 1
    group_of = np.arange(inputs, dtype=np.int32) // size
    if config.get("desc_act"):
        rng.shuffle(group_of)
    groups = inputs // size
    zeros = rng.integers(top // 2, top // 2 + 3, (groups, outputs))
    scales = (np.abs(weight).max() / (top / 2) * rng.uniform(0.9, 1.1, (groups, outputs))).astype(np.float16)
    wide = scales.astype(np.float32)
    codes = np.clip(np.rint(weight.T / wide[group_of] + zeros[group_of]), 0, top).astype(np.int64)
    exact = (wide[group_of] * (codes - zeros[group_of])).T
    if config["quant_method"] == "awq":
        order = [0, 2, 4, 6, 1, 3, 5, 7]
        tensors = {"qweight": pack_words(codes, 4, order), "qzeros": pack_words(zeros, 4, order)}
    else:
        order = list(range(32 // bits))
        stored = zeros if config.get("checkpoint_format") == "gptq_v2" else zeros - 1
        tensors = {
            "qweight": np.ascontiguousarray(pack_words(codes.T, bits, order).T),
            "qzeros": pack_words(stored, bits, order),
            "g_idx": group_of,
        }
    return {f"{name}.{key}": value for key, value in {**tensors, "scales": scales}.items()}, exact


def make_both(
    source: Path, directory: Path, config: dict[str, Any], dense_names: Collection[str] = ()
) -> tuple[Path, Path]:
    """A quantized checkpoint, and a dense one with the same weights. `dense_names`: parts of names left dense."""
    rng = np.random.default_rng(0)
    quantized, dense = (Path(shutil.copytree(source, directory / name)) for name in ("quantized", "dense"))
    packed: dict[str, np.ndarray] = {}
    plain: dict[str, np.ndarray] = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        if "_proj.weight" in name and not any(part in name for part in dense_names):
            tensors, exact = quantize_layer(name.removesuffix(".weight"), tensor, config, rng)
            packed |= tensors
            plain[name] = np.ascontiguousarray(exact.astype(np.float32))
        else:
            packed[name] = plain[name] = tensor
    save_file(packed, quantized / "model.safetensors")
    save_file(plain, dense / "model.safetensors")
    rewrite_config(quantized, quantization_config=config)
    return quantized, dense

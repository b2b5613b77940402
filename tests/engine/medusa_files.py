"""Files with Medusa heads for the tiny checkpoints."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

HIDDEN, VOCAB, NUM_HEADS = 48, 384, 4


def head_tensors(
    outputs: list[np.ndarray], prefix: str = "", scale: float = 0.0, blocks: int = 1
) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    tensors = {}
    for i, output in enumerate(outputs):
        for block in range(blocks):
            weight = rng.normal(scale=scale, size=(HIDDEN, HIDDEN)) if scale else np.zeros((HIDDEN, HIDDEN))
            tensors[f"{prefix}{i}.{block}.linear.weight"] = weight.astype(np.float32)
            tensors[f"{prefix}{i}.{block}.linear.bias"] = np.zeros(HIDDEN, np.float32)
        tensors[f"{prefix}{i}.{blocks}.weight"] = output.astype(np.float32, order="C")
    return tensors


def write_heads(directory: Path, tensors: dict[str, np.ndarray]) -> Path:
    directory.mkdir()
    save_file(tensors, directory / "medusa_lm_head.safetensors")
    return directory

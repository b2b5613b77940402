"""A GGUF file as a `TensorSource`: names and row order are converted to those of Hugging Face checkpoints."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from neso.engine.weights.gguf.blocks import dequantize, quantized_matrix
from neso.engine.weights.gguf.config import ROPE_FACTORS, architecture, model_config
from neso.engine.weights.gguf.file import GGUFFile, TensorType
from neso.engine.weights.quantized import Matrix
from neso.engine.weights.source import CheckpointError, TensorSource, copy_as_float32

_MODEL = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# Sparse layers; GGUF stacks the experts in one tensor.
_SPARSE = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{expert}.gate_proj",
    "ffn_up_exps": "mlp.experts.{expert}.up_proj",
    "ffn_down_exps": "mlp.experts.{expert}.down_proj",
}
_SHARED = {
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
_MIXTRAL = {
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": "block_sparse_moe.experts.{expert}.w1",
    "ffn_up_exps": "block_sparse_moe.experts.{expert}.w3",
    "ffn_down_exps": "block_sparse_moe.experts.{expert}.w2",
}
_EXTRA = {"llama": _MIXTRAL, "qwen2moe": _SPARSE | _SHARED, "qwen3moe": _SPARSE}
_HEAD_NORMS = {"attn_q_norm", "attn_k_norm"}
_QKV = {"attn_q", "attn_k", "attn_v"}
_PROJECTIONS = {*_QKV, "attn_output", "ffn_gate", "ffn_up", "ffn_down"}

# Optional tensors of each architecture.
_NORMED = {"qwen3", "qwen3moe"}
_BIASED = {"llama": _PROJECTIONS, "qwen2": _QKV, "qwen3": {*_QKV, "attn_output"}}
_BIASED |= {"qwen2moe": _BIASED["qwen2"], "qwen3moe": _BIASED["qwen3"]}

_LAYER_NAME = re.compile(r"blk\.(0|[1-9][0-9]*)\.(\w+)\.(weight|bias)")


def huggingface_name(architecture: str, name: str, *, has_experts: bool) -> str | None:
    """Return the Hugging Face name of a GGUF tensor; None if the architecture has no such tensor.

    Names of stacked experts contain the placeholder "{expert}".
    """
    if name in _MODEL:
        return _MODEL[name]
    match = _LAYER_NAME.fullmatch(name)
    if match is None:
        return None
    layer, part, kind = match.groups()
    if has_experts and kind == "weight" and part in _EXTRA.get(architecture, ()):
        return f"model.layers.{layer}.{_EXTRA[architecture][part]}.weight"
    if part not in _LAYER:
        return None
    if kind == "bias" and part not in _BIASED[architecture]:
        return None
    if part in _HEAD_NORMS and architecture not in _NORMED:
        return None
    return f"model.layers.{layer}.{_LAYER[part]}.{kind}"


_ROTATED = re.compile(r".*\.self_attn\.([qk])_proj\.(weight|bias)")


class GGUFCheckpoint(TensorSource):
    """A memory-mapped file of GGUF version 2 or 3.

    - directory: path of the file, for messages
    - config: a config.json equivalent to the metadata

    Supported quantized types: `blocks.BLOCK_FORMATS`. Raises `CheckpointError` on opening for an invalid file,
    and for unsupported architectures, tensors and tensor types.
    """

    def __init__(self, path: Path | str) -> None:
        self.directory = Path(path)
        self._file = GGUFFile(self.directory)
        self._architecture = architecture(self._file)
        self.config = model_config(self._file)
        self._names = self._map_names()

    def names(self) -> Iterator[str]:
        """Return the Hugging Face names of all tensors."""
        return iter(self._names)

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def tensor(self, name: str, shape: tuple[int, ...] | None = None) -> npt.NDArray[Any]:
        """Return a read-only array in the file's dtype; quantized values are dequantized to float32."""
        stored = self._stored(name, shape)
        kind = self._type(name)
        if kind.dtype is not None:
            return stored
        values = np.empty(self._shape(name), np.float32)
        dequantize(kind, stored, values)
        values.flags.writeable = False
        return values

    def matrix(self, name: str, shape: tuple[int, int]) -> Matrix:
        stored = self._stored(name, shape)
        kind = self._type(name)
        return stored if kind.dtype is not None else quantized_matrix(kind, stored)

    def read_float32(self, name: str, target: npt.NDArray[np.float32]) -> None:
        stored = self._stored(name, target.shape)
        kind = self._type(name)
        if kind.dtype is not None:
            copy_as_float32(stored, target)
        else:
            dequantize(kind, stored, target)

    def close(self) -> None:
        self._file.close()

    def _stored(self, name: str, shape: tuple[int, ...] | None) -> npt.NDArray[Any]:
        """Return values or quantized blocks, with rows in Hugging Face's order."""
        if name not in self._names:
            raise CheckpointError(f"{self.directory}: the file has no tensor {name!r}")
        own, expert = self._names[name]
        found = self._shape(name)
        if shape is not None and found != shape:
            raise CheckpointError(
                f"{self.directory}: tensor {own!r} has the shape {list(found)}, but the model needs {list(shape)}"
            )
        stored = self._file.tensor(own)
        if expert is not None:
            part: npt.NDArray[Any] = stored[expert]
            return part
        rotated = _ROTATED.fullmatch(name)
        if rotated is None or self._architecture != "llama":
            return stored
        return self._unpermuted(
            stored, own, "num_attention_heads" if rotated[1] == "q" else "num_key_value_heads"
        )

    def _type(self, name: str) -> TensorType:
        return self._file.entry(self._names[name][0]).type

    def _shape(self, name: str) -> tuple[int, ...]:
        own, expert = self._names[name]
        shape = self._file.entry(own).shape
        return shape if expert is None else shape[1:]

    def _unpermuted(self, stored: npt.NDArray[Any], own: str, heads_field: str) -> npt.NDArray[Any]:
        """Undo the row permutation that converters apply to queries and keys of the "llama" architecture.

        llama.cpp rotates pairs (2i, 2i + 1), Hugging Face pairs (i, i + head_dim / 2), so converters interleave the
        rows of each head. Quantized blocks run along the inputs, so their rows can be permuted too.
        """
        heads, head_dim = self.config[heads_field], self.config["head_dim"]
        if len(stored) != heads * head_dim or head_dim % 2:
            raise CheckpointError(
                f"{self.directory}: tensor {own!r} has {len(stored)} rows, not {heads} heads of {head_dim}"
            )
        order = np.arange(len(stored)).reshape(heads, head_dim // 2, 2).swapaxes(1, 2).reshape(-1)
        rows = stored[order]
        rows.flags.writeable = False
        return rows

    def _map_names(self) -> dict[str, tuple[str, int | None]]:
        """Map Hugging Face names to (GGUF name, index in a stack of experts or None).

        Raises `CheckpointError` for a tensor without a Hugging Face name, because the model would ignore it.
        """
        names: dict[str, tuple[str, int | None]] = {}
        has_experts = "num_experts_per_tok" in self.config
        for own in self._file.names():
            if own == ROPE_FACTORS:
                continue  # converted to config["rope_scaling"]
            name = huggingface_name(self._architecture, own, has_experts=has_experts)
            if name is None:
                raise CheckpointError(
                    f"{self.directory}: tensor {own!r} is not known for the architecture {self._architecture!r}"
                )
            if "{expert}" in name:
                count = self._file.entry(own).shape[0]
                names |= {name.format(expert=expert): (own, expert) for expert in range(count)}
            else:
                names[name] = own, None
        return names

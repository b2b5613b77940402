"""GGUF files, written with the `gguf` package from tiny checkpoints as llama.cpp's converter writes them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type
from gguf import GGUFWriter, TokenType
from safetensors.numpy import load_file

# Offsets of float16 values in blocks; [0] for other types.
_SCALES = {
    **{kind: [0, 2] for kind in (Type.Q4_1, Type.Q5_1, Type.Q4_K, Type.Q5_K)},
    Type.Q2_K: [80, 82],
    Type.Q3_K: [108],
    Type.Q6_K: [208],
}
# Types that the package cannot quantize to.
_RANDOM = {Type.Q2_K, Type.Q3_K, Type.Q4_K, Type.Q5_K, Type.Q6_K, Type.IQ4_NL, Type.IQ4_XS}

_ARCHITECTURES = {"mistral": "llama", "mixtral": "llama", "qwen2_moe": "qwen2moe", "qwen3_moe": "qwen3moe"}
_EXPERT = re.compile(r"\.experts\.(\d+)\.")

PickType = Callable[[str], Type]


def convert(
    checkpoint: Path,
    target: Path,
    pick_type: PickType = lambda name: Type.F32,
    *,
    edit: Callable[[GGUFWriter, str], None] = lambda writer, arch: None,
    tokenizer: Mapping[str, Any] | None = None,
) -> Path:
    """Write the checkpoint directory as a GGUF file.

    - pick_type: the type of each matrix by its Hugging Face name; vectors are F32
    - edit: adds to the metadata, or overwrites
    - tokenizer: options of `write_tokenizer`; None: that of the checkpoint, byte-level
    """
    config = json.loads((checkpoint / "config.json").read_text())
    arch = _ARCHITECTURES.get(config["model_type"], config["model_type"])
    writer = GGUFWriter(target, arch)
    _write_config(writer, config)
    write_tokenizer(writer, json.loads((checkpoint / "tokenizer.json").read_text()), **(tokenizer or {}))
    edit(writer, arch)
    names = gguf.get_tensor_name_map(getattr(gguf.MODEL_ARCH, arch.upper()), config["num_hidden_layers"])
    for name, values in _stacked(load_file(checkpoint / "model.safetensors")).items():
        own = names.get_name(name, (".weight", ".bias"))
        assert own is not None, name
        kind = pick_type(name) if values.ndim > 1 else Type.F32
        data = encode(values, kind, seed=len(name))
        if arch == "llama" and ".q_proj." in name:
            data = permute(data, config["num_attention_heads"])
        if arch == "llama" and ".k_proj." in name:
            data = permute(data, config["num_key_value_heads"])
        writer.add_tensor(own, data, raw_dtype=kind)
    return finish(writer)


def _stacked(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Stack the matrices of the experts: [experts, outputs, inputs]."""
    stacks: dict[str, dict[int, np.ndarray]] = {}
    for name, values in tensors.items():
        match = _EXPERT.search(name)
        stack = stacks.setdefault(_EXPERT.sub(".experts.", name), {})
        stack[int(match[1]) if match else -1] = values
    return {
        name: stack[-1] if -1 in stack else np.stack([stack[i] for i in range(len(stack))])
        for name, stack in stacks.items()
    }


def finish(writer: GGUFWriter) -> Path:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return writer.path


def encode(values: np.ndarray, kind: Type, seed: int = 0) -> np.ndarray:
    """Return values or blocks; random ones of similar magnitude if the package cannot quantize to the type."""
    if kind in _RANDOM:
        return random_blocks(kind, *values.shape, seed=seed)
    return gguf.quants.quantize(values.astype(np.float32), kind)


def random_blocks(kind: Type, rows: int, inputs: int, seed: int = 0) -> np.ndarray:
    """Return random blocks with finite scales: uint8[rows, bytes per row]."""
    size, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (rows * inputs // size, block_bytes), dtype=np.uint8)
    for at in _SCALES.get(kind, [0]):
        scales = rng.uniform(-2e-4, 2e-4, (len(blocks), 1)).astype(np.float16)
        blocks[:, at : at + 2] = scales.view(np.uint8)
    return blocks.reshape(rows, -1)


def permute(weights: np.ndarray, heads: int) -> np.ndarray:
    """Permute rows as the converter does: the halves of each head are interleaved."""
    halves = weights.reshape(heads, 2, weights.shape[0] // heads // 2, *weights.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(weights.shape))


def _write_config(writer: GGUFWriter, config: Mapping[str, Any]) -> None:
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    if count := config.get("num_experts") or config.get("num_local_experts"):
        writer.add_expert_count(count)
        writer.add_expert_used_count(config["num_experts_per_tok"])
    if config.get("moe_intermediate_size"):
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    if config.get("shared_expert_intermediate_size"):
        writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])
    if config.get("sliding_window"):
        writer.add_sliding_window(config["sliding_window"])


def write_tokenizer(
    writer: GGUFWriter,
    tokenizer: Mapping[str, Any],
    *,
    model: str = "gpt2",
    pre: str | None = "gpt-2",
    roles: Mapping[str, int] | None = None,
    template: str | None = None,
) -> None:
    """Write metadata from a tokenizer.json; for "llama", the order of ids determines the scores."""
    added = {token["id"]: token for token in tokenizer["added_tokens"]}
    names = {token_id: name for name, token_id in tokenizer["model"]["vocab"].items()}
    names |= {token_id: token["content"] for token_id, token in added.items()}
    tokens = [names[token_id] for token_id in range(len(names))]
    writer.add_tokenizer_model(model)
    if pre is not None:
        writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([_token_type(name, added.get(i), model) for i, name in enumerate(tokens)])
    if model == "gpt2":
        writer.add_token_merges([" ".join(merge) for merge in tokenizer["model"]["merges"]])
    else:
        writer.add_token_scores([-float(token_id) for token_id in range(len(tokens))])
    for role, token_id in (roles or {"bos": 0, "eos": 1, "pad": 2}).items():
        getattr(writer, f"add_{role}_token_id")(token_id)
    if template is not None:
        writer.add_chat_template(template)


def _token_type(name: str, added: Mapping[str, Any] | None, model: str) -> TokenType:
    if added is not None:
        if name == "<unk>":
            return TokenType.UNKNOWN
        return TokenType.CONTROL if added["special"] else TokenType.USER_DEFINED
    is_byte = model == "llama" and name.startswith("<0x") and len(name) == 6
    return TokenType.BYTE if is_byte else TokenType.NORMAL

"""Names of tensors: llama.cpp's, as GGUF files have them, to those of Hugging Face checkpoints."""

from __future__ import annotations

import re

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
_HEAD_NORMS = {"attn_q_norm", "attn_k_norm"}
_QKV = {"attn_q", "attn_k", "attn_v"}
_PROJECTIONS = {*_QKV, "attn_output", "ffn_gate", "ffn_up", "ffn_down"}

# What each architecture may have beyond the weights that all have.
_NORMED = {"qwen3"}
_BIASED = {"llama": _PROJECTIONS, "qwen2": _QKV, "qwen3": {*_QKV, "attn_output"}}

_LAYER_NAME = re.compile(r"blk\.(0|[1-9][0-9]*)\.(\w+)\.(weight|bias)")


def huggingface_name(architecture: str, name: str) -> str | None:
    """The name that a tensor of a GGUF file has in a checkpoint; None if the architecture has no such tensor."""
    if name in _MODEL:
        return _MODEL[name]
    match = _LAYER_NAME.fullmatch(name)
    if match is None or match[2] not in _LAYER:
        return None
    layer, part, kind = match.groups()
    if kind == "bias" and part not in _BIASED[architecture]:
        return None
    if part in _HEAD_NORMS and architecture not in _NORMED:
        return None
    return f"model.layers.{layer}.{_LAYER[part]}.{kind}"

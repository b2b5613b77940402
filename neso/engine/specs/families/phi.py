"""Phi 1, 1.5 and 2 (parallel branches) and Phi 3, 3.5 and 4 (Llama with fused tensors)."""

from __future__ import annotations

from dataclasses import replace

from neso.engine.specs.config_fields import (
    check_quantization,
    read_activation,
    read_heads,
    read_rotary,
    read_sizes,
    require_value,
)
from neso.engine.specs.config_reader import ConfigReader
from neso.engine.specs.decoder_spec import DecoderSpec, Role, TensorLocation, TensorPart
from neso.engine.specs.families import llama

_LAYER = "model.layers.{layer}."

PHI_NAMES: dict[Role, TensorLocation] = {
    **llama.TENSOR_NAMES,
    "final_norm": "model.final_layernorm.weight",
    "final_norm_bias": "model.final_layernorm.bias",
    "lm_head_bias": "lm_head.bias",
    "attention_norm_bias": _LAYER + "input_layernorm.bias",
    "output": _LAYER + "self_attn.dense.weight",
    "output_bias": _LAYER + "self_attn.dense.bias",
    "up": _LAYER + "mlp.fc1.weight",
    "up_bias": _LAYER + "mlp.fc1.bias",
    "down": _LAYER + "mlp.fc2.weight",
    "down_bias": _LAYER + "mlp.fc2.bias",
}


def phi(config: ConfigReader) -> DecoderSpec:
    """Parallel branches that share a norm, partial rotation, biases everywhere."""
    check_quantization(config)
    require_value(config, "qk_layernorm", False)
    heads = read_heads(config)
    partial = config.with_default("partial_rotary_factor", 0.5)
    rotary, max_position = read_rotary(partial, heads.head_dim, default_length=2048)
    num_layers = config.integer("num_hidden_layers")
    return DecoderSpec(
        family="phi",
        **read_sizes(config, heads),
        max_position=max_position,
        norm="layer",
        norm_eps=config.number("layer_norm_eps", 1e-5),
        norm_bias=True,
        layer_norms=("attention_norm",),
        parallel=True,
        activation=read_activation(config, default="gelu_new"),
        gated=False,
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        lm_head_bias=True,
        tied_embeddings=config.boolean("tie_word_embeddings", False),
        rotaries=(rotary,) * num_layers,
        attention_scale=heads.head_dim**-0.5,
        sliding_windows=(None,) * num_layers,
        tensor_names=PHI_NAMES,
    )


def phi3(config: ConfigReader) -> DecoderSpec:
    """Fused QKV and gate-up tensors, LongRoPE; Phi 4 mini rotates only part of each head."""
    spec = llama.llama(config.with_default("max_position_embeddings", 4096))
    window = config.integer("sliding_window") if config.has("sliding_window") else None
    return replace(
        spec,
        family="phi3",
        sliding_windows=(window,) * spec.num_layers,
        tensor_names={**llama.TENSOR_NAMES, **_fused(spec)},
    )


def _fused(spec: DecoderSpec) -> dict[Role, TensorLocation]:
    query, kv, width = (
        spec.num_heads * spec.head_dim,
        spec.num_kv_heads * spec.head_dim,
        spec.intermediate_size,
    )
    qkv, gate_up = _LAYER + "self_attn.qkv_proj.weight", _LAYER + "mlp.gate_up_proj.weight"
    return {
        "query": TensorPart(qkv, query + 2 * kv, 0, query),
        "key": TensorPart(qkv, query + 2 * kv, query, query + kv),
        "value": TensorPart(qkv, query + 2 * kv, query + kv, query + 2 * kv),
        "gate": TensorPart(gate_up, 2 * width, 0, width),
        "up": TensorPart(gate_up, 2 * width, width, 2 * width),
    }

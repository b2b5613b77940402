"""Llama 1 to 3.x, and the many models that share its architecture."""

from __future__ import annotations

from typing import Any

from neso.engine.specs.config_fields import (
    check_quantization,
    read_activation,
    read_heads,
    read_rotary,
    read_sizes,
)
from neso.engine.specs.config_reader import ConfigReader
from neso.engine.specs.decoder_spec import DecoderSpec, Role, TensorLocation

_LAYER = "model.layers.{layer}."

TENSOR_NAMES: dict[Role, TensorLocation] = {
    "embedding": "model.embed_tokens.weight",
    "final_norm": "model.norm.weight",
    "lm_head": "lm_head.weight",
    "attention_norm": _LAYER + "input_layernorm.weight",
    "query": _LAYER + "self_attn.q_proj.weight",
    "key": _LAYER + "self_attn.k_proj.weight",
    "value": _LAYER + "self_attn.v_proj.weight",
    "query_bias": _LAYER + "self_attn.q_proj.bias",
    "key_bias": _LAYER + "self_attn.k_proj.bias",
    "value_bias": _LAYER + "self_attn.v_proj.bias",
    "output": _LAYER + "self_attn.o_proj.weight",
    "output_bias": _LAYER + "self_attn.o_proj.bias",
    "mlp_norm": _LAYER + "post_attention_layernorm.weight",
    "gate": _LAYER + "mlp.gate_proj.weight",
    "up": _LAYER + "mlp.up_proj.weight",
    "gate_bias": _LAYER + "mlp.gate_proj.bias",
    "up_bias": _LAYER + "mlp.up_proj.bias",
    "down": _LAYER + "mlp.down_proj.weight",
    "down_bias": _LAYER + "mlp.down_proj.bias",
}


def llama(config: ConfigReader) -> DecoderSpec:
    attention_bias = config.boolean("attention_bias", False)
    return read_llama(
        config,
        default_length=2048,
        family="llama",
        qkv_bias=attention_bias,
        output_bias=attention_bias,
        mlp_bias=config.boolean("mlp_bias", False),
    )


def read_llama(
    config: ConfigReader,
    *,
    default_length: int,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    **fields: Any,
) -> DecoderSpec:
    """Read the spec of a model with Llama's layers.

    - default_length, kv_heads, head_dim: the family's defaults of fields of `config.json`
    - fields: fields of the spec in which the family differs from Llama without biases
    """
    check_quantization(config)
    heads = read_heads(config, kv_heads, head_dim)
    rotary, max_position = read_rotary(config, heads.head_dim, default_length=default_length)
    num_layers = config.integer("num_hidden_layers")
    shared: dict[str, Any] = {
        **read_sizes(config, heads),
        "max_position": max_position,
        "norm": "rms",
        "norm_eps": config.number("rms_norm_eps", 1e-6),
        "activation": read_activation(config),
        "tied_embeddings": config.boolean("tie_word_embeddings", False),
        "rotaries": (rotary,) * num_layers,
        "attention_scale": heads.head_dim**-0.5,
        "sliding_windows": (None,) * num_layers,
        "tensor_names": TENSOR_NAMES,
    }
    return DecoderSpec(**{**shared, **fields})

"""StarCoder 2: grouped-query attention, LayerNorm, a plain MLP, biases everywhere."""

from __future__ import annotations

from neso.engine.specs.config_fields import (
    check_quantization,
    read_activation,
    read_heads,
    read_rotary,
    read_sizes,
)
from neso.engine.specs.config_reader import ConfigReader
from neso.engine.specs.decoder_spec import DecoderSpec, Role, TensorLocation
from neso.engine.specs.families import llama

_LAYER = "model.layers.{layer}."

TENSOR_NAMES: dict[Role, TensorLocation] = {
    **llama.TENSOR_NAMES,
    "final_norm_bias": "model.norm.bias",
    "attention_norm_bias": _LAYER + "input_layernorm.bias",
    "mlp_norm_bias": _LAYER + "post_attention_layernorm.bias",
    "up": _LAYER + "mlp.c_fc.weight",
    "up_bias": _LAYER + "mlp.c_fc.bias",
    "down": _LAYER + "mlp.c_proj.weight",
    "down_bias": _LAYER + "mlp.c_proj.bias",
}


def starcoder2(config: ConfigReader) -> DecoderSpec:
    check_quantization(config)
    heads = read_heads(config, kv_heads=2)
    rotary, max_position = read_rotary(config, heads.head_dim, default_length=4096)
    num_layers = config.integer("num_hidden_layers")
    window = config.integer("sliding_window") if config.has("sliding_window") else None
    biased = config.boolean("use_bias", True)
    return DecoderSpec(
        family="starcoder2",
        **read_sizes(config, heads),
        max_position=max_position,
        norm="layer",
        norm_eps=config.number("norm_epsilon", 1e-5),
        norm_bias=True,
        activation=read_activation(config, default="gelu_pytorch_tanh"),
        gated=False,
        qkv_bias=biased,
        output_bias=biased,
        mlp_bias=biased,
        tied_embeddings=config.boolean("tie_word_embeddings", True),
        rotaries=(rotary,) * num_layers,
        attention_scale=heads.head_dim**-0.5,
        sliding_windows=(window,) * num_layers,
        tensor_names=TENSOR_NAMES,
    )

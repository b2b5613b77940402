"""GPT-NeoX and Pythia: parallel branches with separate norms; queries, keys and values fused per head."""

from __future__ import annotations

from neso.engine.specs.config_fields import (
    check_quantization,
    read_activation,
    read_heads,
    read_rotary,
    read_sizes,
)
from neso.engine.specs.config_reader import ConfigReader
from neso.engine.specs.decoder_spec import DecoderSpec, Role, TensorLocation, TensorPart

_LAYER = "gpt_neox.layers.{layer}."


def gpt_neox(config: ConfigReader) -> DecoderSpec:
    check_quantization(config)
    heads = read_heads(config.without("num_key_value_heads"))
    renamed = config.renamed({"rotary_pct": "partial_rotary_factor", "rotary_emb_base": "rope_theta"})
    rotary, max_position = read_rotary(
        renamed.with_default("partial_rotary_factor", 0.25), heads.head_dim, default_length=2048
    )
    num_layers = config.integer("num_hidden_layers")
    attention_bias = config.boolean("attention_bias", True)
    return DecoderSpec(
        family="gpt_neox",
        **read_sizes(config, heads),
        max_position=max_position,
        norm="layer",
        norm_eps=config.number("layer_norm_eps", 1e-5),
        norm_bias=True,
        parallel=config.boolean("use_parallel_residual", True),
        activation=read_activation(config, default="gelu"),
        gated=False,
        qkv_bias=attention_bias,
        output_bias=attention_bias,
        mlp_bias=True,
        tied_embeddings=config.boolean("tie_word_embeddings", False),
        rotaries=(rotary,) * num_layers,
        attention_scale=heads.head_dim**-0.5,
        sliding_windows=(None,) * num_layers,
        tensor_names=_names(heads.num_heads, heads.head_dim),
    )


def _names(num_heads: int, head_dim: int) -> dict[Role, TensorLocation]:
    def part(kind: str, index: int) -> TensorPart:
        """Return the rows of one kind. Each head has its query, followed by its key and its value."""
        name, outputs = f"{_LAYER}attention.query_key_value.{kind}", 3 * num_heads * head_dim
        return TensorPart(name, outputs, index * head_dim, (index + 1) * head_dim, groups=num_heads)

    return {
        "embedding": "gpt_neox.embed_in.weight",
        "final_norm": "gpt_neox.final_layer_norm.weight",
        "final_norm_bias": "gpt_neox.final_layer_norm.bias",
        "lm_head": "embed_out.weight",
        "attention_norm": _LAYER + "input_layernorm.weight",
        "attention_norm_bias": _LAYER + "input_layernorm.bias",
        "query": part("weight", 0),
        "key": part("weight", 1),
        "value": part("weight", 2),
        "query_bias": part("bias", 0),
        "key_bias": part("bias", 1),
        "value_bias": part("bias", 2),
        "output": _LAYER + "attention.dense.weight",
        "output_bias": _LAYER + "attention.dense.bias",
        "mlp_norm": _LAYER + "post_attention_layernorm.weight",
        "mlp_norm_bias": _LAYER + "post_attention_layernorm.bias",
        "up": _LAYER + "mlp.dense_h_to_4h.weight",
        "up_bias": _LAYER + "mlp.dense_h_to_4h.bias",
        "down": _LAYER + "mlp.dense_4h_to_h.weight",
        "down_bias": _LAYER + "mlp.dense_4h_to_h.bias",
    }

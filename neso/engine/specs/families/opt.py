"""OPT: learned positions from row 2 on, LayerNorm, a plain ReLU MLP; OPT-350m norms the sums (post-norm)."""

from __future__ import annotations

from neso.engine.specs.config_fields import (
    check_quantization,
    read_activation,
    read_heads,
    require_value,
)
from neso.engine.specs.config_reader import ConfigReader
from neso.engine.specs.decoder_spec import DecoderSpec, NormRole, Role, TensorLocation, TensorProduct

_MODEL = "model.decoder."
_LAYER = _MODEL + "layers.{layer}."

TENSOR_NAMES: dict[Role, TensorLocation] = {
    "embedding": _MODEL + "embed_tokens.weight",
    "position_embedding": _MODEL + "embed_positions.weight",
    "final_norm": _MODEL + "final_layer_norm.weight",
    "final_norm_bias": _MODEL + "final_layer_norm.bias",
    "lm_head": "lm_head.weight",
    "attention_norm": _LAYER + "self_attn_layer_norm.weight",
    "attention_norm_bias": _LAYER + "self_attn_layer_norm.bias",
    "query": _LAYER + "self_attn.q_proj.weight",
    "key": _LAYER + "self_attn.k_proj.weight",
    "value": _LAYER + "self_attn.v_proj.weight",
    "query_bias": _LAYER + "self_attn.q_proj.bias",
    "key_bias": _LAYER + "self_attn.k_proj.bias",
    "value_bias": _LAYER + "self_attn.v_proj.bias",
    "output": _LAYER + "self_attn.out_proj.weight",
    "output_bias": _LAYER + "self_attn.out_proj.bias",
    "mlp_norm": _LAYER + "final_layer_norm.weight",
    "mlp_norm_bias": _LAYER + "final_layer_norm.bias",
    "attention_sum_norm": _LAYER + "self_attn_layer_norm.weight",
    "attention_sum_norm_bias": _LAYER + "self_attn_layer_norm.bias",
    "mlp_sum_norm": _LAYER + "final_layer_norm.weight",
    "mlp_sum_norm_bias": _LAYER + "final_layer_norm.bias",
    "up": _LAYER + "fc1.weight",
    "up_bias": _LAYER + "fc1.bias",
    "down": _LAYER + "fc2.weight",
    "down_bias": _LAYER + "fc2.bias",
}
_FIRST_POSITION = 2


def opt(config: ConfigReader) -> DecoderSpec:
    check_quantization(config)
    require_value(config, "layer_norm_elementwise_affine", True)
    norm_first = config.boolean("do_layer_norm_before", True)
    layer_norms: tuple[NormRole, ...] = ("attention_norm", "mlp_norm")
    if not norm_first:
        layer_norms = ("attention_sum_norm", "mlp_sum_norm")
    hidden_size = config.integer("hidden_size")
    tied = config.boolean("tie_word_embeddings", True)
    embedding_size = config.integer("word_embed_proj_dim", hidden_size)
    projected = embedding_size != hidden_size
    heads = read_heads(config.without("num_key_value_heads"))
    num_layers = config.integer("num_hidden_layers")
    biased = config.boolean("enable_bias", True)
    return DecoderSpec(
        family="opt",
        vocab_size=config.integer("vocab_size"),
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=heads.num_heads,
        num_kv_heads=heads.num_kv_heads,
        head_dim=heads.head_dim,
        intermediate_size=config.integer("ffn_dim"),
        max_position=config.integer("max_position_embeddings", 2048),
        norm="layer",
        norm_eps=1e-5,
        norm_bias=True,
        layer_norms=layer_norms,
        has_final_norm=norm_first and not config.boolean("_remove_final_layer_norm", False),
        activation=read_activation(config, "activation_function", "relu"),
        gated=False,
        qkv_bias=biased,
        output_bias=biased,
        mlp_bias=biased,
        tied_embeddings=tied and not projected,
        rotaries=(None,) * num_layers,
        position_offset=_FIRST_POSITION,
        attention_scale=heads.head_dim**-0.5,
        sliding_windows=(None,) * num_layers,
        tensor_names={**TENSOR_NAMES, **(_projected(embedding_size, tied) if projected else {})},
    )


def _projected(embedding_size: int, tied: bool) -> dict[Role, TensorLocation]:
    """Return the embedding and the LM head of a model whose embedding has another width than its layers.

    They differ even if the checkpoint ties them, because each has a projection of its own.
    """
    embedding = _MODEL + "embed_tokens.weight"
    head = embedding if tied else "lm_head.weight"
    return {
        "embedding": TensorProduct(embedding, _MODEL + "project_in.weight", embedding_size, transposed=True),
        "lm_head": TensorProduct(head, _MODEL + "project_out.weight", embedding_size),
    }

"""GPT-2: learned positions, LayerNorm, a plain MLP; matrices are stored [inputs, outputs]."""

from __future__ import annotations

from neso.engine.specs.config_fields import (
    check_quantization,
    read_activation,
    require_value,
)
from neso.engine.specs.config_reader import ConfigReader
from neso.engine.specs.decoder_spec import DecoderSpec, Role, TensorLocation, TensorPart

_LAYER = "transformer.h.{layer}."


def gpt2(config: ConfigReader) -> DecoderSpec:
    check_quantization(config)
    require_value(config, "scale_attn_weights", True)
    require_value(config, "scale_attn_by_inverse_layer_idx", False)
    require_value(config, "add_cross_attention", False)
    hidden_size, num_layers = config.integer("n_embd", 768), config.integer("n_layer", 12)
    num_heads = config.integer("n_head", 12)
    if hidden_size % num_heads:
        raise config.invalid("n_embd", f"({hidden_size}) is no multiple of {num_heads} attention heads")
    intermediate_size = config.integer("n_inner", 4 * hidden_size)
    return DecoderSpec(
        family="gpt2",
        vocab_size=config.integer("vocab_size"),
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=hidden_size // num_heads,
        intermediate_size=intermediate_size,
        max_position=config.integer("n_positions", 1024),
        norm="layer",
        norm_eps=config.number("layer_norm_epsilon", 1e-5),
        norm_bias=True,
        activation=read_activation(config, "activation_function", "gelu_new"),
        gated=False,
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        tied_embeddings=config.boolean("tie_word_embeddings", True),
        rotaries=(None,) * num_layers,
        position_offset=0,
        attention_scale=(hidden_size // num_heads) ** -0.5,
        sliding_windows=(None,) * num_layers,
        tensor_names=_names(hidden_size, intermediate_size),
    )


def _names(hidden: int, intermediate: int) -> dict[Role, TensorLocation]:
    roles: tuple[Role, ...] = ("query", "key", "value")
    biases: tuple[Role, ...] = ("query_bias", "key_bias", "value_bias")
    qkv = _LAYER + "attn.c_attn"
    parts: dict[Role, TensorLocation] = {}
    for index, (role, bias) in enumerate(zip(roles, biases, strict=True)):
        begin, end = index * hidden, (index + 1) * hidden
        parts[role] = TensorPart(f"{qkv}.weight", 3 * hidden, begin, end, transposed=True)
        parts[bias] = TensorPart(f"{qkv}.bias", 3 * hidden, begin, end)

    def transposed(name: str, outputs: int) -> TensorPart:
        return TensorPart(_LAYER + name, outputs, 0, outputs, transposed=True)

    return {
        "embedding": "transformer.wte.weight",
        "position_embedding": "transformer.wpe.weight",
        "final_norm": "transformer.ln_f.weight",
        "final_norm_bias": "transformer.ln_f.bias",
        "lm_head": "lm_head.weight",
        **parts,
        "attention_norm": _LAYER + "ln_1.weight",
        "attention_norm_bias": _LAYER + "ln_1.bias",
        "output": transposed("attn.c_proj.weight", hidden),
        "output_bias": _LAYER + "attn.c_proj.bias",
        "mlp_norm": _LAYER + "ln_2.weight",
        "mlp_norm_bias": _LAYER + "ln_2.bias",
        "up": transposed("mlp.c_fc.weight", intermediate),
        "up_bias": _LAYER + "mlp.c_fc.bias",
        "down": transposed("mlp.c_proj.weight", hidden),
        "down_bias": _LAYER + "mlp.c_proj.bias",
    }

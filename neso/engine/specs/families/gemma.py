"""Gemma 1 to 3."""

from __future__ import annotations

from dataclasses import replace

from neso.engine.specs.config_fields import (
    check_quantization,
    read_activation,
    read_heads,
    read_rotary,
    read_sizes,
    read_window_layers,
    require_value,
)
from neso.engine.specs.config_reader import ConfigReader
from neso.engine.specs.decoder_spec import DecoderSpec, Role, TensorLocation
from neso.engine.specs.families import llama
from neso.engine.specs.rotary_spec import RotarySpec

_LAYER = "model.layers.{layer}."

GEMMA2_NAMES: dict[Role, TensorLocation] = {
    **llama.TENSOR_NAMES,
    "attention_post_norm": _LAYER + "post_attention_layernorm.weight",
    "mlp_norm": _LAYER + "pre_feedforward_layernorm.weight",
    "mlp_post_norm": _LAYER + "post_feedforward_layernorm.weight",
}
GEMMA3_NAMES: dict[Role, TensorLocation] = {
    **GEMMA2_NAMES,
    "query_norm": _LAYER + "self_attn.q_norm.weight",
    "key_norm": _LAYER + "self_attn.k_norm.weight",
}
_MULTIMODAL_NAMES: dict[Role, TensorLocation] = {
    role: f"language_model.{location}" for role, location in GEMMA3_NAMES.items()
}
_MAX_POSITION = 131072
_THETAS = {"full_attention": 1_000_000.0, "sliding_attention": 10_000.0}


def gemma(config: ConfigReader) -> DecoderSpec:
    """Llama with scaled embeddings, norm weights offset by 1, and GELU."""
    require_value(config, "use_bidirectional_attention", False)
    activation = read_activation(
        config,
        "hidden_activation" if config.has("hidden_activation") else "hidden_act",
        "gelu_pytorch_tanh",
    )
    attention_bias = config.boolean("attention_bias", False)
    return llama.read_llama(
        config.without("hidden_act"),
        default_length=8192,
        head_dim=256,
        family="gemma",
        norm_offset=1.0,
        # The first checkpoints say "gelu" and were trained with the tanh approximation.
        activation="gelu_tanh" if activation == "gelu" else activation,
        qkv_bias=attention_bias,
        output_bias=attention_bias,
        tied_embeddings=config.boolean("tie_word_embeddings", True),
        embedding_scale=config.integer("hidden_size") ** 0.5,
    )


def gemma2(config: ConfigReader) -> DecoderSpec:
    """Norms before and after each branch, soft caps, a window on every other layer."""
    check_quantization(config)
    require_value(config, "use_bidirectional_attention", False)
    heads = read_heads(config, kv_heads=4, head_dim=256)
    rotary, max_position = read_rotary(config, heads.head_dim, default_length=8192)
    num_layers = config.integer("num_hidden_layers")
    hidden_size = config.integer("hidden_size")
    window = config.integer("sliding_window", 4096)
    windowed = read_window_layers(config, num_layers, period=2)
    attention_bias = config.boolean("attention_bias", False)
    return DecoderSpec(
        family="gemma2",
        **read_sizes(config, heads),
        max_position=max_position,
        norm="rms",
        norm_eps=config.number("rms_norm_eps", 1e-6),
        norm_offset=1.0,
        layer_norms=("attention_norm", "attention_post_norm", "mlp_norm", "mlp_post_norm"),
        activation=read_activation(config, "hidden_activation", "gelu_pytorch_tanh"),
        qkv_bias=attention_bias,
        output_bias=attention_bias,
        tied_embeddings=config.boolean("tie_word_embeddings", True),
        rotaries=(rotary,) * num_layers,
        attention_scale=config.number("query_pre_attn_scalar", 256) ** -0.5,
        attention_softcap=_read_softcap(config, "attn_logit_softcapping", 50.0),
        sliding_windows=tuple(window if has_window else None for has_window in windowed),
        embedding_scale=hidden_size**0.5,
        logit_softcap=_read_softcap(config, "final_logit_softcapping", 30.0),
        tensor_names=GEMMA2_NAMES,
    )


def gemma3(config: ConfigReader) -> DecoderSpec:
    """Text-only Gemma 3: query and key norms instead of a score cap; windowed layers have their own rotation."""
    flat = config.without("rope_parameters", "rope_scaling")
    spec = gemma2(flat.with_default("max_position_embeddings", _MAX_POSITION))
    windowed = read_window_layers(config, spec.num_layers, config.integer("sliding_window_pattern", 6))
    window = config.integer("sliding_window", 4096)
    full, local = _read_rotaries(config, spec.head_dim, spec.max_position)
    return replace(
        spec,
        family="gemma3",
        qk_norm="head",
        rotaries=tuple(local if has_window else full for has_window in windowed),
        sliding_windows=tuple(window if has_window else None for has_window in windowed),
        # transformers reads `attn_logit_softcapping` but does not apply it.
        attention_softcap=None,
        logit_softcap=_read_softcap(config, "final_logit_softcapping", None),
        tensor_names=GEMMA3_NAMES,
    )


def gemma3_multimodal(config: ConfigReader) -> DecoderSpec:
    """The language model of a Gemma 3 checkpoint with a vision tower; images are not supported."""
    text = config.section("text_config")
    # `text_config` of early models omits these fields.
    for field, default in (("num_attention_heads", 8), ("num_key_value_heads", 4), ("vocab_size", 262_208)):
        text = text.with_default(field, default)
    return replace(gemma3(text), tensor_names=_MULTIMODAL_NAMES)


def _read_softcap(config: ConfigReader, field: str, default: float | None) -> float | None:
    """Read a soft cap; an explicit null disables it."""
    if config.mentions(field) and not config.has(field):
        return None
    return config.number(field, default) if config.has(field) or default is not None else None


def _read_rotaries(config: ConfigReader, head_dim: int, max_position: int) -> tuple[RotarySpec, RotarySpec]:
    """Read the rotations of full and of sliding-window layers.

    They are in `rope_parameters` by layer type, or in older fields.
    """
    if config.has("rope_parameters") and config.section("rope_parameters").nests_objects():
        kinds = config.section("rope_parameters")
        sections = {kind: kinds.section(kind) if kinds.has(kind) else ConfigReader({}) for kind in _THETAS}
    else:
        scaling = config.section("rope_scaling") if config.has("rope_scaling") else ConfigReader({})
        sections = {
            "full_attention": scaling.with_default("rope_theta", config.number("rope_theta", 1e6)),
            "sliding_attention": ConfigReader({"rope_theta": config.number("rope_local_base_freq", 1e4)}),
        }
    full, local = (
        RotarySpec.from_section(
            config, sections[kind].with_default("rope_theta", theta), head_dim, max_position
        )
        for kind, theta in _THETAS.items()
    )
    return full, local

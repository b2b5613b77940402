"""OLMo 2 and 3 (Llama with norms after the branches) and OLMoE (Llama with experts); all norm queries and keys."""

from __future__ import annotations

from dataclasses import replace

from neso.engine.specs.config_fields import read_heads, read_window_layers, require_value
from neso.engine.specs.config_reader import ConfigReader
from neso.engine.specs.decoder_spec import DecoderSpec, ExpertsSpec, Role, TensorLocation
from neso.engine.specs.families import llama
from neso.engine.specs.families.qwen import EXPERT_NAMES, QWEN3_NAMES
from neso.engine.specs.rotary_spec import RotarySpec, scaled_length

_LAYER = "model.layers.{layer}."

OLMO2_NAMES: dict[Role, TensorLocation] = {
    **llama.TENSOR_NAMES,
    "query_norm": _LAYER + "self_attn.q_norm.weight",
    "key_norm": _LAYER + "self_attn.k_norm.weight",
    "attention_post_norm": _LAYER + "post_attention_layernorm.weight",
    "mlp_post_norm": _LAYER + "post_feedforward_layernorm.weight",
}


def olmo2(config: ConfigReader) -> DecoderSpec:
    return replace(
        llama.llama(config.with_default("rms_norm_eps", 1e-5)),
        family="olmo2",
        layer_norms=("attention_post_norm", "mlp_post_norm"),
        qk_norm="width",
        tensor_names=OLMO2_NAMES,
    )


def olmo3(config: ConfigReader) -> DecoderSpec:
    """OLMo 2 with windows on three of four layers, which rotate without the scaling of the others."""
    full, local = _read_rotaries(config)
    # The fields of the rotation are read above.
    flat = config.without("rope_parameters", "rope_scaling").with_default("rope_theta", full.theta)
    spec = olmo2(flat)
    windowed = read_window_layers(config, spec.num_layers, period=4)
    window = config.integer("sliding_window", 4096)
    return replace(
        spec,
        family="olmo3",
        max_position=scaled_length(full.scaling, spec.max_position),
        rotaries=tuple(local if has_window else full for has_window in windowed),
        sliding_windows=tuple(window if has_window else None for has_window in windowed),
    )


def _read_rotaries(config: ConfigReader) -> tuple[RotarySpec, RotarySpec]:
    """Return the rotations of layers without and with a window."""
    head_dim, length = read_heads(config).head_dim, config.integer("max_position_embeddings", 2048)
    theta = config.number("rope_theta", 500_000.0)
    kinds = config.section("rope_parameters") if config.has("rope_parameters") else ConfigReader({})
    if kinds.nests_objects():
        sections = [kinds.section(kind) for kind in ("full_attention", "sliding_attention")]
    else:
        scaling = config.section("rope_scaling") if config.has("rope_scaling") else kinds
        theta = scaling.number("rope_theta", theta)
        sections = [scaling, ConfigReader({})]
    full, local = (
        RotarySpec.from_section(config, section.with_default("rope_theta", theta), head_dim, length)
        for section in sections
    )
    return full, local


def olmoe(config: ConfigReader) -> DecoderSpec:
    """Experts in every layer (arXiv 2409.02060)."""
    require_value(config, "clip_qkv", None)
    spec = llama.llama(config.with_default("rms_norm_eps", 1e-5))
    experts = ExpertsSpec(
        count=config.integer("num_experts", 64),
        top_k=config.integer("num_experts_per_tok", 8),
        intermediate_size=spec.intermediate_size,
        normalized=config.boolean("norm_topk_prob", False),
        layers=(True,) * spec.num_layers,
    )
    return replace(
        spec,
        family="olmoe",
        qk_norm="width",
        experts=experts,
        tensor_names={**QWEN3_NAMES, **EXPERT_NAMES},
    )

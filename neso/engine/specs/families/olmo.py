"""OLMo 2 (Llama with norms after the branches) and OLMoE (Llama with experts); both norm queries and keys."""

from __future__ import annotations

from dataclasses import replace

from neso.engine.specs.config_fields import (
    require_value,
)
from neso.engine.specs.config_reader import ConfigReader
from neso.engine.specs.decoder_spec import DecoderSpec, ExpertsSpec, Role, TensorLocation
from neso.engine.specs.families import llama
from neso.engine.specs.families.qwen import EXPERT_NAMES, QWEN3_NAMES

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

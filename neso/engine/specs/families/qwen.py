"""Qwen 2 and 2.5, Qwen 3, and their mixture-of-experts models."""

from __future__ import annotations

from dataclasses import replace

from neso.engine.specs.config_fields import read_qwen_windows
from neso.engine.specs.config_reader import ConfigReader
from neso.engine.specs.decoder_spec import DecoderSpec, ExpertsSpec, Role, TensorLocation
from neso.engine.specs.families import llama

QWEN3_NAMES: dict[Role, TensorLocation] = {
    **llama.TENSOR_NAMES,
    "query_norm": "model.layers.{layer}.self_attn.q_norm.weight",
    "key_norm": "model.layers.{layer}.self_attn.k_norm.weight",
}
_MLP = "model.layers.{layer}.mlp."

EXPERT_NAMES: dict[Role, TensorLocation] = {
    "router": _MLP + "gate.weight",
    "expert_gate": _MLP + "experts.{expert}.gate_proj.weight",
    "expert_up": _MLP + "experts.{expert}.up_proj.weight",
    "expert_down": _MLP + "experts.{expert}.down_proj.weight",
    "shared_router": _MLP + "shared_expert_gate.weight",
    "shared_gate": _MLP + "shared_expert.gate_proj.weight",
    "shared_up": _MLP + "shared_expert.up_proj.weight",
    "shared_down": _MLP + "shared_expert.down_proj.weight",
}


def qwen2(config: ConfigReader) -> DecoderSpec:
    """Llama with biases on queries, keys and values, and windows on the upper layers."""
    return llama.read_llama(
        config,
        default_length=32768,
        family="qwen2",
        qkv_bias=True,
        sliding_windows=read_qwen_windows(config, config.integer("num_hidden_layers")),
    )


def qwen2_moe(config: ConfigReader) -> DecoderSpec:
    """Qwen 1.5 and 2 with experts, and a gated expert shared by all tokens."""
    biased = config.boolean("qkv_bias", True)
    spec = replace(qwen2(config), family="qwen2_moe", qkv_bias=biased)
    experts = replace(
        _read_experts(config, spec.num_layers, "num_experts"),
        shared_size=config.integer("shared_expert_intermediate_size"),
        shared_gated=True,
    )
    return replace(spec, experts=experts, tensor_names={**llama.TENSOR_NAMES, **EXPERT_NAMES})


def qwen3(config: ConfigReader) -> DecoderSpec:
    """Qwen 2 with norms on queries and keys instead of biases; head_dim is 128 by default."""
    attention_bias = config.boolean("attention_bias", False)
    return llama.read_llama(
        config,
        default_length=32768,
        head_dim=128,
        family="qwen3",
        qkv_bias=attention_bias,
        output_bias=attention_bias,
        qk_norm="head",
        sliding_windows=read_qwen_windows(config, config.integer("num_hidden_layers")),
        tensor_names=QWEN3_NAMES,
    )


def qwen3_moe(config: ConfigReader) -> DecoderSpec:
    """Qwen 3 with experts, without a shared one."""
    plain = config.with_default("use_sliding_window", False)
    spec = qwen3(plain.with_default("max_window_layers", 0))
    # transformers 5 renamed the field.
    field = "num_experts" if config.has("num_experts") else "num_local_experts"
    return replace(
        spec,
        family="qwen3_moe",
        experts=_read_experts(config, spec.num_layers, field),
        tensor_names={**QWEN3_NAMES, **EXPERT_NAMES},
    )


def _read_experts(config: ConfigReader, num_layers: int, count_field: str) -> ExpertsSpec:
    """Read the experts. Every `decoder_sparse_step`-th layer is sparse, except `mlp_only_layers`."""
    step, dense = config.integer("decoder_sparse_step", 1), config.integers("mlp_only_layers")
    return ExpertsSpec(
        count=config.integer(count_field),
        top_k=config.integer("num_experts_per_tok"),
        intermediate_size=config.integer("moe_intermediate_size"),
        normalized=config.boolean("norm_topk_prob", False),
        layers=tuple((layer + 1) % step == 0 and layer not in dense for layer in range(num_layers)),
    )

"""Mistral (Llama with a sliding window over all layers) and Mixtral (Mistral with experts)."""

from __future__ import annotations

from dataclasses import replace

from neso.engine.specs.config_reader import ConfigReader, UnsupportedModel
from neso.engine.specs.decoder_spec import DecoderSpec, ExpertsSpec, Role, TensorLocation
from neso.engine.specs.families import llama

_DEFAULT_WINDOW = 4096
_EXPERTS = "model.layers.{layer}.block_sparse_moe."

MIXTRAL_NAMES: dict[Role, TensorLocation] = {
    **llama.TENSOR_NAMES,
    "router": _EXPERTS + "gate.weight",
    "expert_gate": _EXPERTS + "experts.{expert}.w1.weight",
    "expert_up": _EXPERTS + "experts.{expert}.w3.weight",
    "expert_down": _EXPERTS + "experts.{expert}.w2.weight",
}


def mistral(config: ConfigReader) -> DecoderSpec:
    num_layers = config.integer("num_hidden_layers")
    return llama.read_llama(
        config,
        default_length=131072,
        kv_heads=8,
        family="mistral",
        sliding_windows=(_read_window(config, num_layers),) * num_layers,
    )


def mixtral(config: ConfigReader) -> DecoderSpec:
    """Eight experts in every layer, two per token (arXiv 2401.04088)."""
    window = config.integer("sliding_window") if config.has("sliding_window") else None
    spec = mistral(config.without("sliding_window").with_default("rope_theta", 1e6))
    experts = ExpertsSpec(
        count=config.integer("num_local_experts", 8),
        top_k=config.integer("num_experts_per_tok", 2),
        intermediate_size=spec.intermediate_size,
        normalized=True,
        layers=(True,) * spec.num_layers,
    )
    return replace(
        spec,
        family="mixtral",
        experts=experts,
        sliding_windows=(window,) * spec.num_layers,
        tensor_names=MIXTRAL_NAMES,
    )


def _read_window(config: ConfigReader, num_layers: int) -> int | None:
    """Read the window. Null means no window (v0.2 onwards); an absent field means the window of Mistral 7B v0.1."""
    none = config.mentions("sliding_window") and not config.has("sliding_window")
    window = None if none else config.integer("sliding_window", _DEFAULT_WINDOW)
    if config.has("layer_types"):
        kind = "full_attention" if window is None else "sliding_attention"
        if set(config.strings("layer_types", num_layers)) != {kind}:
            raise UnsupportedModel(
                "config field 'layer_types': the layers of a Mistral model are all alike; "
                f"with 'sliding_window' {window} they can only be {kind!r}"
            )
    return window

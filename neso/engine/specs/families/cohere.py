"""Cohere Command R (parallel branches, LayerNorm without bias) and Command R7B and A (with sliding windows)."""

from __future__ import annotations

from dataclasses import replace

from neso.engine.specs.config_fields import read_window_layers, require_value
from neso.engine.specs.config_reader import ConfigReader
from neso.engine.specs.decoder_spec import DecoderSpec, Role, TensorLocation, TensorPart
from neso.engine.specs.families import llama


def cohere(config: ConfigReader) -> DecoderSpec:
    """Command R."""
    require_value(config, "use_qk_norm", False)
    spec = llama.llama(config.with_default("tie_word_embeddings", True))
    return replace(
        spec,
        family="cohere",
        norm="layer",
        norm_eps=config.number("layer_norm_eps", 1e-5),
        layer_norms=("attention_norm",),
        parallel=True,
        logit_scale=config.number("logit_scale", 0.0625),
        tensor_names={**llama.TENSOR_NAMES, **_interleaved_heads(spec)},
    )


def cohere2(config: ConfigReader) -> DecoderSpec:
    """Command R7B and A: layers with a window rotate, layers without one do not."""
    spec = cohere(config)
    window = config.integer("sliding_window", 4096)
    windowed = read_window_layers(config, spec.num_layers, config.integer("sliding_window_pattern", 4))
    return replace(
        spec,
        family="cohere2",
        rotaries=tuple(
            rotary if has_window else None for rotary, has_window in zip(spec.rotaries, windowed, strict=True)
        ),
        sliding_windows=tuple(window if has_window else None for has_window in windowed),
    )


def _interleaved_heads(spec: DecoderSpec) -> dict[Role, TensorLocation]:
    def part(name: str, heads: int) -> TensorPart:
        outputs = heads * spec.head_dim
        name = "model.layers.{layer}.self_attn." + name
        return TensorPart(name, outputs, 0, outputs, paired=spec.head_dim)

    return {
        "query": part("q_proj.weight", spec.num_heads),
        "key": part("k_proj.weight", spec.num_kv_heads),
        "query_bias": part("q_proj.bias", spec.num_heads),
        "key_bias": part("k_proj.bias", spec.num_kv_heads),
    }

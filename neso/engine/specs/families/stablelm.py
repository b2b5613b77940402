"""StableLM 2 and 3B: Llama with LayerNorm and partial rotation; some models have parallel branches."""

from __future__ import annotations

from dataclasses import replace

from neso.engine.specs.config_fields import (
    require_value,
)
from neso.engine.specs.config_reader import ConfigReader
from neso.engine.specs.decoder_spec import DecoderSpec, Role, TensorLocation
from neso.engine.specs.families import llama

TENSOR_NAMES: dict[Role, TensorLocation] = {
    **llama.TENSOR_NAMES,
    "final_norm_bias": "model.norm.bias",
    "attention_norm_bias": "model.layers.{layer}.input_layernorm.bias",
    "mlp_norm_bias": "model.layers.{layer}.post_attention_layernorm.bias",
}


def stablelm(config: ConfigReader) -> DecoderSpec:
    require_value(config, "qk_layernorm", False)
    parallel = config.boolean("use_parallel_residual", False)
    return replace(
        llama.llama(config.with_default("partial_rotary_factor", 0.25)),
        family="stablelm",
        norm="layer",
        norm_eps=config.number("layer_norm_eps", 1e-5),
        norm_bias=True,
        layer_norms=("attention_norm",) if parallel else ("attention_norm", "mlp_norm"),
        parallel=parallel,
        qkv_bias=config.boolean("use_qkv_bias", False),
        tensor_names=TENSOR_NAMES,
    )

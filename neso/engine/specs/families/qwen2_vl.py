"""Qwen2-VL (arXiv 2409.12191) and Qwen2.5-VL (arXiv 2502.13923): a tower for any image size, and Qwen 2 with M-RoPE."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from neso.engine.specs.config_reader import ConfigReader, InvalidConfig
from neso.engine.specs.encoder_spec import read_activation, read_head_dim
from neso.engine.specs.vision_spec import GridVisionSpec

_ARCHITECTURES = {
    "qwen2_vl": "Qwen2VLForConditionalGeneration",
    "qwen2_5_vl": "Qwen2_5_VLForConditionalGeneration",
}
_PREFIXES = ("visual.", "model.visual.")
_MROPE_SECTION = [16, 24, 24]
"""transformers' default."""


def vision_spec(config: Mapping[str, Any]) -> GridVisionSpec:
    """See `neso.engine.specs.vision_spec.vision_spec`."""
    reader = ConfigReader(config)
    vision = reader.section("vision_config")
    is_newer = _ARCHITECTURES["qwen2_5_vl"] in config["architectures"]
    hidden_size = vision.integer("hidden_size", 3584) if is_newer else vision.integer("embed_dim", 1280)
    num_heads = vision.integer("num_heads", 16)
    if read_head_dim(hidden_size, num_heads, vision) % 4:
        raise vision.invalid(
            "num_heads", f"gives heads of {hidden_size // num_heads}, which must be divisible by 4"
        )
    patch_size, merge = vision.integer("patch_size", 14), vision.integer("spatial_merge_size", 2)
    window, full_layers = None, frozenset[int]()
    if is_newer:
        window = vision.integer("window_size", 112) // (patch_size * merge)
        if not window:
            raise vision.invalid(
                "window_size", f"is smaller than the {patch_size * merge} pixels of an embedding"
            )
        full_layers = frozenset(
            vision.with_default("fullatt_block_indexes", [7, 15, 23, 31]).integers("fullatt_block_indexes")
        )
        intermediate_size = vision.integer("intermediate_size", 3420)
        num_outputs = vision.integer("out_hidden_size", 3584)
    else:
        intermediate_size = hidden_size * vision.integer("mlp_ratio", 4)
        num_outputs = vision.integer("hidden_size", 3584)
    width = ConfigReader(text_config(config)).integer("hidden_size")
    if num_outputs != width:
        raise vision.invalid(
            "out_hidden_size" if is_newer else "hidden_size", f"is {num_outputs}, not {width}"
        )
    rotary = vision.with_default("rope_parameters", {}).section("rope_parameters")
    return GridVisionSpec(
        image_token_id=reader.integer("image_token_id", 151655, minimum=0),
        patch_size=patch_size,
        patch_copies=vision.integer("temporal_patch_size", 2),
        merge=merge,
        hidden_size=hidden_size,
        num_layers=vision.integer("depth", 32),
        num_heads=num_heads,
        intermediate_size=intermediate_size,
        num_outputs=num_outputs,
        norm="rms" if is_newer else "layer",
        activation=read_activation(vision, default="silu" if is_newer else "quick_gelu"),
        gated=is_newer,
        rotary_theta=rotary.number("rope_theta", 10_000.0),
        window=window,
        full_layers=full_layers,
        prefixes=_PREFIXES,
    )


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the config.json of the language model: `text_config`, or the file itself in older checkpoints."""
    nested = config.get("text_config")
    if nested is not None and not isinstance(nested, Mapping):
        raise InvalidConfig("config field 'text_config' must be a JSON object")
    section = {"rope_theta": 1_000_000.0, "rms_norm_eps": 1e-5, **(config if nested is None else nested)}
    if isinstance(config.get("tie_word_embeddings"), bool):
        section["tie_word_embeddings"] = config["tie_word_embeddings"]
    field = "rope_scaling" if section.get("rope_scaling") else "rope_parameters"
    rope = section.get(field) or {}
    if isinstance(rope, dict):
        section[field] = {"mrope_section": _MROPE_SECTION, **rope}
    section["architectures"] = ["Qwen2ForCausalLM"]
    return section

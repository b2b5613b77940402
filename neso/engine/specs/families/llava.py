"""LLaVA 1.5 (arXiv 2310.03744): a CLIP vision tower, a projector of two matrices, and a language model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from neso.engine.specs.config_reader import ConfigReader, UnsupportedModel
from neso.engine.specs.encoder_spec import (
    ACTIVATIONS,
    LayerRole,
    LayerStackSpec,
    VisionRole,
    VisionSpec,
    read_activation,
    read_head_dim,
)
from neso.engine.specs.registry import MODEL_TYPES

ARCHITECTURE = "LlavaForConditionalGeneration"

_LAYER = "encoder.layers.{layer}."

LAYER_NAMES: dict[LayerRole, str] = {
    "attention_norm": _LAYER + "layer_norm1",
    "query": _LAYER + "self_attn.q_proj",
    "key": _LAYER + "self_attn.k_proj",
    "value": _LAYER + "self_attn.v_proj",
    "output": _LAYER + "self_attn.out_proj",
    "mlp_norm": _LAYER + "layer_norm2",
    "up": _LAYER + "mlp.fc1",
    "down": _LAYER + "mlp.fc2",
}
TOWER_NAMES: dict[VisionRole, str] = {
    "class_token": "embeddings.class_embedding",
    "patches": "embeddings.patch_embedding.weight",
    "positions": "embeddings.position_embedding",
    "first_norm": "pre_layrnorm",
}
_PREFIXES = (
    "vision_tower.vision_model.",
    "vision_tower.",
    "model.vision_tower.vision_model.",
    "model.vision_tower.",
)

# Defaults of Hugging Face's config classes for fields that `text_config` omits.
_TEXT_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
    },
    "mistral": {
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
}


def vision_spec(config: Mapping[str, Any]) -> VisionSpec | None:
    """Return the vision tower of the model described by a config.json; None if it has none.

    Raises `UnsupportedModel` for an unsupported feature, `InvalidConfig` for an invalid field.
    """
    if ARCHITECTURE not in (config.get("architectures") or []):
        return None
    reader = ConfigReader(config)
    vision = reader.section("vision_config")
    kind = vision.string("model_type", "clip_vision_model")
    if kind != "clip_vision_model":
        raise UnsupportedModel(
            f"vision towers of type {kind!r} are not supported; supported is clip_vision_model"
        )
    activation = reader.string("projector_hidden_act", "gelu")
    if activation not in ACTIVATIONS:
        raise UnsupportedModel(f"config field 'projector_hidden_act': {activation!r} is not supported")
    hidden_size, num_heads = vision.integer("hidden_size", 768), vision.integer("num_attention_heads", 12)
    image_token = "image_token_index" if reader.has("image_token_index") else "image_token_id"
    return VisionSpec(
        image_size=vision.integer("image_size", 224),
        patch_size=vision.integer("patch_size", 32),
        layers=LayerStackSpec(
            hidden_size=hidden_size,
            num_layers=_num_layers(reader, vision.integer("num_hidden_layers", 12)),
            num_heads=num_heads,
            head_dim=read_head_dim(hidden_size, num_heads, vision),
            intermediate_size=vision.integer("intermediate_size", 3072),
            norm_eps=vision.number("layer_norm_eps", 1e-5),
            activation=read_activation(vision, default="quick_gelu"),
            norm_first=True,
            tensor_names=LAYER_NAMES,
        ),
        keeps_class_token=_keeps_class_token(reader),
        output_size=ConfigReader(text_config(config)).integer("hidden_size"),
        projector_activation=ACTIVATIONS[activation],
        projector_bias=reader.boolean("multimodal_projector_bias", True),
        image_token_id=reader.integer(image_token, 32000, minimum=0),
        prefixes=_PREFIXES,
        tensor_names=TOWER_NAMES,
    )


def text_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config.json of the language model."""
    section = dict(config.get("text_config") or {})
    model_type = str(section.get("model_type", "llama"))
    if model_type not in MODEL_TYPES:
        raise UnsupportedModel(
            f"language models of type {model_type!r} are not supported with a vision tower"
        )
    section["architectures"] = [MODEL_TYPES[model_type]]
    return {**_TEXT_DEFAULTS.get(model_type, {}), **section}


def _num_layers(config: ConfigReader, depth: int) -> int:
    """Return the number of layers up to the one whose output is used; `vision_feature_layer` -2 skips the last one."""
    layer = config.value("vision_feature_layer")
    layer = -2 if layer is None else layer
    if not isinstance(layer, int) or not -depth - 1 <= layer <= depth:
        raise UnsupportedModel(f"config field 'vision_feature_layer': {layer!r} is not supported")
    return layer if layer >= 0 else depth + 1 + layer


def _keeps_class_token(config: ConfigReader) -> bool:
    strategy = config.string("vision_feature_select_strategy", "default")
    if strategy not in ("default", "full"):
        raise UnsupportedModel(
            f"config field 'vision_feature_select_strategy': {strategy!r} is not supported"
        )
    return strategy == "full"

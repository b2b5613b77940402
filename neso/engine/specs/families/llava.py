"""LLaVA 1.5 (arXiv 2310.03744): a CLIP or SigLIP tower, a projector of two matrices, and a language model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from neso.engine.specs.config_reader import ConfigReader, UnsupportedModel
from neso.engine.specs.encoder_spec import read_activation
from neso.engine.specs.families.siglip import clip_tower, siglip_tower
from neso.engine.specs.vision_spec import ProjectorSpec, VisionSpec, read_text_config

_TOWERS = {"clip_vision_model": clip_tower, "siglip_vision_model": siglip_tower}
_PREFIXES = (
    "vision_tower.vision_model.",
    "vision_tower.",
    "model.vision_tower.vision_model.",
    "model.vision_tower.",
)


def vision_spec(config: Mapping[str, Any]) -> VisionSpec:
    """See `neso.engine.specs.vision_spec.vision_spec`."""
    reader = ConfigReader(config)
    vision = reader.section("vision_config")
    kind = vision.string("model_type", "clip_vision_model")
    if kind not in _TOWERS:
        raise UnsupportedModel(
            f"vision towers of type {kind!r} are not supported; supported are {', '.join(_TOWERS)}"
        )
    num_layers = _num_layers(reader, vision.integer("num_hidden_layers", 12))
    tower = _TOWERS[kind](vision, num_layers, _PREFIXES)
    output_size = ConfigReader(text_config(config)).integer("hidden_size")
    image_token = "image_token_index" if reader.has("image_token_index") else "image_token_id"
    return VisionSpec(
        image_token_id=reader.integer(image_token, 32000, minimum=0),
        layout="square",
        tower=tower,
        projector=ProjectorSpec(
            drops_first_row=_drops_first_row(reader),
            merge=1,
            names=("linear_1", "linear_2"),
            widths=(tower.layers.hidden_size, output_size, output_size),
            activation=read_activation(reader, "projector_hidden_act"),
            bias=reader.boolean("multimodal_projector_bias", True),
            prefixes=("multi_modal_projector.", "model.multi_modal_projector."),
        ),
    )


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the config.json of the language model."""
    return read_text_config(config, "llama")


def _num_layers(config: ConfigReader, depth: int) -> int:
    """Return the number of layers up to the one whose output is used; `vision_feature_layer` -2 skips the last one."""
    layer = config.value("vision_feature_layer")
    layer = -2 if layer is None else layer
    if not isinstance(layer, int) or not -depth - 1 <= layer <= depth:
        raise UnsupportedModel(f"config field 'vision_feature_layer': {layer!r} is not supported")
    return layer if layer >= 0 else depth + 1 + layer


def _drops_first_row(config: ConfigReader) -> bool:
    strategy = config.string("vision_feature_select_strategy", "default")
    if strategy not in ("default", "full"):
        raise UnsupportedModel(
            f"config field 'vision_feature_select_strategy': {strategy!r} is not supported"
        )
    return strategy == "default"

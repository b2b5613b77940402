"""Idefics 3 (arXiv 2408.12637) and SmolVLM: a SigLIP tower for tiles of an image, pixel shuffle, and Llama."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from neso.engine.specs.config_reader import ConfigReader
from neso.engine.specs.families.siglip import siglip_tower
from neso.engine.specs.vision_spec import ProjectorSpec, VisionSpec, read_text_config


def vision_spec(config: Mapping[str, Any]) -> VisionSpec:
    """See `neso.engine.specs.vision_spec.vision_spec`."""
    reader = ConfigReader(config)
    vision = reader.section("vision_config")
    tower = siglip_tower(
        vision,
        None,
        ("model.vision_model.", "vision_model."),
        hidden_size=1152,
        num_heads=16,
        patch_size=32,
        has_last_norm=True,
    )
    merge = reader.integer("scale_factor", 2)
    if tower.image_size % (tower.patch_size * merge):
        raise reader.invalid(
            "scale_factor", f"({merge}) does not divide the {tower.patches_per_side} patches of a side"
        )
    output_size = ConfigReader(text_config(config)).integer("hidden_size")
    return VisionSpec(
        image_token_id=reader.integer("image_token_id", 128257, minimum=0),
        layout="tiles",
        tower=tower,
        projector=ProjectorSpec(
            drops_first_row=False,
            merge=merge,
            names=("modality_projection.proj",),
            widths=(tower.layers.hidden_size * merge**2, output_size),
            activation="gelu",
            bias=False,
            prefixes=("model.connector.", "connector."),
        ),
    )


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the config.json of the language model."""
    section = {"rms_norm_eps": 1e-5, **read_text_config(config, "llama")}
    if isinstance(config.get("tie_word_embeddings"), bool):
        section["tie_word_embeddings"] = config["tie_word_embeddings"]
    return section

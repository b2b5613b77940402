"""CLIP (arXiv 2103.00020) and SigLIP (arXiv 2303.15343): vision transformers for square images."""

from __future__ import annotations

from neso.engine.specs.config_reader import ConfigReader
from neso.engine.specs.encoder_spec import LayerRole, LayerStackSpec, read_activation, read_head_dim
from neso.engine.specs.vision_spec import TowerRole, TowerSpec

_LAYER = "encoder.layers.{layer}."

_LAYER_NAMES: dict[LayerRole, str] = {
    "attention_norm": _LAYER + "layer_norm1",
    "query": _LAYER + "self_attn.q_proj",
    "key": _LAYER + "self_attn.k_proj",
    "value": _LAYER + "self_attn.v_proj",
    "output": _LAYER + "self_attn.out_proj",
    "mlp_norm": _LAYER + "layer_norm2",
    "up": _LAYER + "mlp.fc1",
    "down": _LAYER + "mlp.fc2",
}
_TOWER_NAMES: dict[TowerRole, str] = {
    "class_token": "embeddings.class_embedding",
    "patches": "embeddings.patch_embedding",
    "positions": "embeddings.position_embedding",
    "first_norm": "pre_layrnorm",
    "last_norm": "post_layernorm",
}


def clip_tower(vision: ConfigReader, num_layers: int | None, prefixes: tuple[str, ...]) -> TowerSpec:
    """Return the spec of a tower with class token and first norm. `num_layers`: layers to run, None for all."""
    return TowerSpec(
        image_size=vision.integer("image_size", 224),
        patch_size=vision.integer("patch_size", 32),
        layers=_layers(vision, num_layers, hidden_size=768, num_heads=12, activation="quick_gelu", eps=1e-5),
        has_class_token=True,
        patch_bias=False,
        has_first_norm=True,
        has_last_norm=False,
        prefixes=prefixes,
        tensor_names=_TOWER_NAMES,
    )


def siglip_tower(
    vision: ConfigReader,
    num_layers: int | None,
    prefixes: tuple[str, ...],
    *,
    hidden_size: int = 768,
    num_heads: int = 12,
    patch_size: int = 16,
    has_last_norm: bool = False,
) -> TowerSpec:
    """Return the spec of a tower without class token.

    `num_layers`: layers to run, None for all. `hidden_size`, `num_heads`, `patch_size`: used if the config has none.
    """
    return TowerSpec(
        image_size=vision.integer("image_size", 224),
        patch_size=vision.integer("patch_size", patch_size),
        layers=_layers(
            vision,
            num_layers,
            hidden_size=hidden_size,
            num_heads=num_heads,
            activation="gelu_pytorch_tanh",
            eps=1e-6,
        ),
        has_class_token=False,
        patch_bias=True,
        has_first_norm=False,
        has_last_norm=has_last_norm,
        prefixes=prefixes,
        tensor_names=_TOWER_NAMES,
    )


def _layers(
    vision: ConfigReader,
    num_layers: int | None,
    *,
    hidden_size: int,
    num_heads: int,
    activation: str,
    eps: float,
) -> LayerStackSpec:
    hidden_size = vision.integer("hidden_size", hidden_size)
    num_heads = vision.integer("num_attention_heads", num_heads)
    return LayerStackSpec(
        hidden_size=hidden_size,
        num_layers=vision.integer("num_hidden_layers", 12) if num_layers is None else num_layers,
        num_heads=num_heads,
        head_dim=read_head_dim(hidden_size, num_heads, vision),
        intermediate_size=vision.integer("intermediate_size", 3072),
        norm_eps=vision.number("layer_norm_eps", eps),
        activation=read_activation(vision, default=activation),
        norm_first=True,
        tensor_names=_LAYER_NAMES,
    )

"""Vision towers and projectors as data, and the families of models that have them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, ClassVar, Literal

from neso.engine.specs.config_reader import UnsupportedModel
from neso.engine.specs.decoder_spec import NormKind
from neso.engine.specs.encoder_spec import EncoderActivation, LayerStackSpec
from neso.engine.specs.registry import MODEL_TYPES

TowerRole = Literal["class_token", "patches", "positions", "first_norm", "last_norm"]
ImageLayout = Literal["square", "tiles", "grid"]

# Architecture to module in neso/engine/specs/families, which has the functions `vision_spec` and `text_config`.
VISION_ARCHITECTURES = {
    "LlavaForConditionalGeneration": "llava",
    "Idefics3ForConditionalGeneration": "idefics3",
    "SmolVLMForConditionalGeneration": "idefics3",
    "Qwen2VLForConditionalGeneration": "qwen2_vl",
    "Qwen2_5_VLForConditionalGeneration": "qwen2_vl",
}

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


@dataclass(frozen=True, slots=True, kw_only=True)
class TowerSpec:
    """Vision transformer for images of `image_size` x `image_size` pixels (CLIP, SigLIP).

    first_norm([class token, patches] + positions) goes through `layers`, which end at the layer whose output is used,
    then through last_norm. Class token and norms are optional; `patch_bias`: whether the product of the patches has a
    bias. `prefixes`: possible prefixes of tensor names.
    """

    image_size: int
    patch_size: int
    layers: LayerStackSpec
    has_class_token: bool
    patch_bias: bool
    has_first_norm: bool
    has_last_norm: bool
    prefixes: tuple[str, ...]
    tensor_names: Mapping[TowerRole, str] = field(hash=False, repr=False)

    @property
    def patches_per_side(self) -> int:
        return self.image_size // self.patch_size

    @property
    def num_rows(self) -> int:
        """Rows of the output: the class token, then the patches from left to right and from top to bottom."""
        return self.patches_per_side**2 + self.has_class_token


@dataclass(frozen=True, slots=True, kw_only=True)
class ProjectorSpec:
    """Maps rows of the tower to embeddings of the language model: products with an activation between them.

    - drops_first_row: the first row of the tower, usually the class token, is not used
    - merge: edge of the squares of patches whose rows are concatenated to one (pixel shuffle)
    - names: matrices in the order of the products; widths: their inputs, and the outputs of the last one
    - prefixes: possible prefixes of tensor names
    """

    drops_first_row: bool
    merge: int
    names: tuple[str, ...]
    widths: tuple[int, ...]
    activation: EncoderActivation
    bias: bool
    prefixes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionSpec:
    """Vision tower and projector of a model.

    `image_token_id` is the placeholder of an image in a prompt. `layout`: how an image becomes input of the tower:
    "square": one square; "tiles": several squares, whose edges are those of the tower, and the whole image as one;
    "grid": an image of any number of patches, see `GridVisionSpec`.
    """

    image_token_id: int
    layout: ImageLayout
    tower: TowerSpec
    projector: ProjectorSpec

    @property
    def tile_edge(self) -> int:
        """Edge of a square in pixels."""
        return self.tower.image_size

    @property
    def tokens_per_tile(self) -> int:
        """Number of embeddings of one square."""
        return (self.tower.num_rows - self.projector.drops_first_row) // self.projector.merge**2


@dataclass(frozen=True, slots=True, kw_only=True)
class GridVisionSpec:
    """Vision transformer for a grid of patches of any size, and the projector to the language model (Qwen2-VL).

    - image_token_id: placeholder of an image in a prompt
    - patch_size: edge of a patch in pixels; patch_copies: number of times that the weights of a patch see it, because
      they are made for as many images of a video
    - merge: edge of the squares of patches that become one embedding; num_outputs: its width
    - Layers are pre-norm; norms are "rms", without biases, or "layer". Queries and keys are rotated: the first half of
      the pairs by the row of the patch, the second half by its column. The MLP is down(activation(gate(x)) * up(x)) if
      `gated`, else down(activation(up(x))).
    - window: edge in embeddings of the squares within which layers attend, except `full_layers`; None: no windows
    - prefixes: possible prefixes of tensor names
    """

    image_token_id: int
    patch_size: int
    patch_copies: int
    merge: int
    hidden_size: int
    num_layers: int
    num_heads: int
    intermediate_size: int
    num_outputs: int
    norm: NormKind
    activation: EncoderActivation
    gated: bool
    rotary_theta: float
    window: int | None
    full_layers: frozenset[int]
    prefixes: tuple[str, ...]

    layout: ClassVar[ImageLayout] = "grid"
    tokens_per_tile: ClassVar[int] = 1

    @property
    def tile_edge(self) -> int:
        """Edge in pixels of the square that becomes one embedding."""
        return self.patch_size * self.merge

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    def attends_within_windows(self, layer: int) -> bool:
        return self.window is not None and layer not in self.full_layers


def vision_spec(config: Mapping[str, Any]) -> VisionSpec | GridVisionSpec | None:
    """Return the vision tower of the model described by a config.json; None if it has none.

    Raises `UnsupportedModel` for an unsupported feature, `InvalidConfig` for an invalid field.
    """
    family = _family(config)
    if family is None:
        return None
    spec: VisionSpec | GridVisionSpec = family.vision_spec(config)
    return spec


def language_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the config.json of the language model: `config` itself for a model without vision tower."""
    family = _family(config)
    if family is None:
        return config
    text: Mapping[str, Any] = family.text_config(config)
    return text


def read_text_config(config: Mapping[str, Any], default_type: str) -> dict[str, Any]:
    """Return the field `text_config` with an architecture and the defaults of its type. Raises `UnsupportedModel`."""
    section = dict(config.get("text_config") or {})
    model_type = str(section.get("model_type", default_type))
    if model_type not in MODEL_TYPES:
        raise UnsupportedModel(
            f"language models of type {model_type!r} are not supported with a vision tower"
        )
    section["architectures"] = [MODEL_TYPES[model_type]]
    return {**_TEXT_DEFAULTS.get(model_type, {}), **section}


def _family(config: Mapping[str, Any]) -> Any:
    architectures = config.get("architectures") or []
    for name in architectures if isinstance(architectures, list) else []:
        if name in VISION_ARCHITECTURES:
            return import_module(f"neso.engine.specs.families.{VISION_ARCHITECTURES[name]}")
    return None

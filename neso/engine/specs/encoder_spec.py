"""Encoders as data: stacks of bidirectional layers, and text encoders."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

from neso.engine.specs.config_fields import ACTIVATIONS as DECODER_ACTIVATIONS
from neso.engine.specs.config_reader import ConfigReader, UnsupportedModel
from neso.engine.specs.decoder_spec import TensorPart
from neso.engine.specs.rotary_spec import RotarySpec

LayerRole = Literal["attention_norm", "query", "key", "value", "output", "mlp_norm", "gate", "up", "down"]
EmbeddingRole = Literal["word", "position", "type", "norm", "final_norm"]
EncoderActivation = Literal["gelu", "gelu_tanh", "quick_gelu", "relu", "silu"]

ACTIVATIONS: dict[str, EncoderActivation] = {**DECODER_ACTIVATIONS, "quick_gelu": "quick_gelu"}
"""Activations by Hugging Face's names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerStackSpec:
    """Transformer layers with bidirectional attention within a sequence, and LayerNorm.

    - `norm_first`: x += attention(norm(x)); x += mlp(norm(x)) (pre-norm, vision transformers); otherwise
      x = norm(x + attention(x)); x = norm(x + mlp(x)) (post-norm, BERT). `has_first_norm`: False if the attention of
      the first pre-norm layer reads x itself.
    - The MLP is down(activation(up(x))), or down(activation(gate(x)) * up(x)) if `gated`.
    - `biased`: the matrices and norms that have a bias.
    - `rotaries`: rotary embedding of each layer, None for none. `reaches`: for each layer, the number of tokens on each
      side of a token that it attends to, None for all. Empty: no layer has one.
    - `tensor_names`: name of each role in the checkpoint without ".weight" and ".bias", with placeholder "{layer}", or
      the rows of a fused tensor.
    """

    hidden_size: int
    num_layers: int
    num_heads: int
    head_dim: int
    intermediate_size: int
    norm_eps: float
    activation: EncoderActivation
    norm_first: bool
    has_first_norm: bool = True
    gated: bool = False
    biased: frozenset[LayerRole] = frozenset(get_args(LayerRole))
    rotaries: tuple[RotarySpec | None, ...] = ()
    reaches: tuple[int | None, ...] = ()
    tensor_names: Mapping[LayerRole, str | TensorPart] = field(hash=False, repr=False)

    @property
    def attention_scale(self) -> float:
        return float(self.head_dim**-0.5)

    def rotary(self, layer: int) -> RotarySpec | None:
        return self.rotaries[layer] if self.rotaries else None

    def reach(self, layer: int) -> int | None:
        return self.reaches[layer] if self.reaches else None

    def has_attention_norm(self, layer: int) -> bool:
        return self.has_first_norm or layer > 0

    def shape(self, role: LayerRole) -> tuple[int, ...]:
        """Return the shape of a weight: [outputs, inputs], or [hidden] of a norm."""
        hidden, width = self.hidden_size, self.num_heads * self.head_dim
        shapes: dict[LayerRole, tuple[int, ...]] = {
            "attention_norm": (hidden,),
            "mlp_norm": (hidden,),
            "output": (hidden, width),
            "gate": (self.intermediate_size, hidden),
            "up": (self.intermediate_size, hidden),
            "down": (hidden, self.intermediate_size),
        }
        return shapes.get(role, (width, hidden))


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassifierSpec:
    """out(norm(activation(dense(x)))) of the first token's hidden state, or of their mean.

    `labels` name the outputs; with `multi_label` several labels can apply to one input. `norm`: name of the norm, or
    None. `dense_bias`, `norm_bias`: whether they have a bias.
    """

    dense: str
    out: str
    activation: EncoderActivation | Literal["tanh"]
    labels: tuple[str, ...]
    multi_label: bool
    pooling: Literal["cls", "mean"] = "cls"
    dense_bias: bool = True
    norm: str | None = None
    norm_bias: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderSpec:
    """Text encoder: norm(word + position + type) goes through the layers, and then through a final norm if it has one.

    - num_positions: rows of the table of learned positions; 0 if there is none
    - max_position: maximum sequence length in tokens
    - padding_id: RoBERTa's offset of positions, position = padding_id + 1 + index; None: positions start at 0
    - num_token_types: 0 if there is no token type table
    - prefix: optional prefix of tensor names in the checkpoint
    """

    family: str
    vocab_size: int
    num_positions: int
    max_position: int
    padding_id: int | None
    num_token_types: int
    layers: LayerStackSpec
    classifier: ClassifierSpec | None
    prefix: str
    tensor_names: Mapping[EmbeddingRole, str] = field(hash=False, repr=False)

    @property
    def hidden_size(self) -> int:
        return self.layers.hidden_size


def read_activation(
    config: ConfigReader, field: str = "hidden_act", default: str = "gelu"
) -> EncoderActivation:
    name = config.string(field, default)
    if name not in ACTIVATIONS:
        raise UnsupportedModel(
            f"config field '{field}': activation {name!r} is not supported; supported are {', '.join(ACTIVATIONS)}"
        )
    return ACTIVATIONS[name]


def read_head_dim(hidden_size: int, num_heads: int, config: ConfigReader, field: str = "hidden_size") -> int:
    if hidden_size % num_heads:
        raise config.invalid(field, f"({hidden_size}) is no multiple of {num_heads} attention heads")
    return hidden_size // num_heads


def require_absolute_positions(config: ConfigReader) -> None:
    kind = config.string("position_embedding_type", "absolute")
    if kind != "absolute":
        raise UnsupportedModel(f"config field 'position_embedding_type': {kind!r} is not supported")
    if config.boolean("is_decoder", False):
        raise UnsupportedModel("config field 'is_decoder': true is not supported for encoders")


def read_classifier(
    config: ConfigReader, dense: str, out: str, activation: EncoderActivation | Literal["tanh"] = "tanh"
) -> ClassifierSpec | None:
    """Return the classifier of a "...ForSequenceClassification" architecture; None for other architectures."""
    if not is_classifier(config):
        return None
    return ClassifierSpec(
        dense=dense,
        out=out,
        activation=activation,
        labels=read_labels(config),
        multi_label=is_multi_label(config),
    )


def is_classifier(config: ConfigReader) -> bool:
    architectures = config.value("architectures") or []
    return any(str(name).endswith("ForSequenceClassification") for name in architectures)


def read_labels(config: ConfigReader) -> tuple[str, ...]:
    """Return the names of a classifier's classes, in the order of its outputs."""
    names = config.value("id2label")
    if isinstance(names, dict) and names:
        return tuple(str(label) for _, label in sorted(names.items(), key=lambda item: int(item[0])))
    return tuple(f"LABEL_{i}" for i in range(config.integer("num_labels", 2)))  # Hugging Face's default


def is_multi_label(config: ConfigReader) -> bool:
    """Whether several classes can apply to a text, so that each has a probability of its own."""
    return bool(config.value("problem_type") == "multi_label_classification")

"""ModernBERT (arXiv 2412.13663): pre-norm without biases, rotations, gated MLP, local and global attention."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

from neso.engine.specs.config_fields import read_window_layers
from neso.engine.specs.config_reader import ConfigReader, UnsupportedModel
from neso.engine.specs.decoder_spec import TensorPart
from neso.engine.specs.encoder_spec import (
    ClassifierSpec,
    EmbeddingRole,
    EncoderSpec,
    LayerRole,
    LayerStackSpec,
    read_activation,
    read_classifier,
    read_head_dim,
)
from neso.engine.specs.rotary_spec import RotarySpec

_LAYER = "layers.{layer}."

EMBEDDING_NAMES: dict[EmbeddingRole, str] = {
    "word": "embeddings.tok_embeddings",
    "norm": "embeddings.norm",
    "final_norm": "final_norm",
}
_THETAS = {
    "full_attention": ("global_rope_theta", 160_000.0),
    "sliding_attention": ("local_rope_theta", 10_000.0),
}
_BIASES: dict[str, tuple[LayerRole, ...]] = {
    "attention_bias": ("query", "key", "value", "output"),
    "mlp_bias": ("gate", "up", "down"),
    "norm_bias": ("attention_norm", "mlp_norm"),
}


def modernbert(config: ConfigReader) -> EncoderSpec:
    hidden_size, num_heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    num_layers, width = config.integer("num_hidden_layers"), config.integer("intermediate_size")
    head_dim = read_head_dim(hidden_size, num_heads, config)
    positions = config.integer("max_position_embeddings", 8192)
    local = _read_local_layers(config, num_layers)
    rotaries = _read_rotaries(config, head_dim, positions)
    reach = config.integer("local_attention", 128) // 2
    unbiased = {
        role for field, roles in _BIASES.items() if not config.boolean(field, False) for role in roles
    }
    return EncoderSpec(
        family="modernbert",
        vocab_size=config.integer("vocab_size"),
        num_positions=0,
        max_position=positions,
        padding_id=None,
        num_token_types=0,
        layers=LayerStackSpec(
            hidden_size=hidden_size,
            num_layers=num_layers,
            num_heads=num_heads,
            head_dim=head_dim,
            intermediate_size=width,
            norm_eps=config.number("norm_eps", 1e-5),
            activation=read_activation(config, "hidden_activation"),
            norm_first=True,
            has_first_norm=False,
            gated=True,
            biased=frozenset(get_args(LayerRole)) - unbiased,
            rotaries=tuple(rotaries["sliding_attention" if near else "full_attention"] for near in local),
            reaches=tuple(reach if near else None for near in local),
            tensor_names=_layer_names(hidden_size, width),
        ),
        classifier=_read_head(config),
        prefix="model.",
        tensor_names=EMBEDDING_NAMES,
    )


def _layer_names(hidden_size: int, width: int) -> dict[LayerRole, str | TensorPart]:
    qkv, gate_up = _LAYER + "attn.Wqkv", _LAYER + "mlp.Wi"
    return {
        "attention_norm": _LAYER + "attn_norm",
        "query": TensorPart(qkv, 3 * hidden_size, 0, hidden_size),
        "key": TensorPart(qkv, 3 * hidden_size, hidden_size, 2 * hidden_size),
        "value": TensorPart(qkv, 3 * hidden_size, 2 * hidden_size, 3 * hidden_size),
        "output": _LAYER + "attn.Wo",
        "mlp_norm": _LAYER + "mlp_norm",
        "gate": TensorPart(gate_up, 2 * width, 0, width),
        "up": TensorPart(gate_up, 2 * width, width, 2 * width),
        "down": _LAYER + "mlp.Wo",
    }


def _read_local_layers(config: ConfigReader, num_layers: int) -> tuple[bool, ...]:
    """Return for each layer whether its attention is local: from `layer_types`, else all but every n-th from 0 on."""
    if config.has("layer_types"):
        return read_window_layers(config, num_layers, 1)
    period = config.integer("global_attn_every_n_layers", 3)
    return tuple(layer % period != 0 for layer in range(num_layers))


def _read_rotaries(config: ConfigReader, head_dim: int, positions: int) -> dict[str, RotarySpec]:
    """Read the rotations of both kinds of layers: `rope_parameters` by kind, or bases in fields of their own."""
    if config.has("rope_scaling"):
        raise UnsupportedModel("config field 'rope_scaling' is not supported for ModernBERT")
    kinds = config.section("rope_parameters") if config.has("rope_parameters") else ConfigReader({})
    rotaries = {}
    for kind, (field, theta) in _THETAS.items():
        section = kinds.section(kind) if kinds.has(kind) else ConfigReader({})
        section = section.with_default("rope_theta", config.number(field, theta))
        rotaries[kind] = RotarySpec.from_section(config, section, head_dim, positions)
    return rotaries


def _read_head(config: ConfigReader) -> ClassifierSpec | None:
    activation = read_activation(config, "classifier_activation")
    spec = read_classifier(config, dense="head.dense", out="classifier", activation=activation)
    if spec is None:
        return None
    pooling = config.string("classifier_pooling", "cls")
    if pooling not in ("cls", "mean"):
        raise config.invalid("classifier_pooling", f"must be 'cls' or 'mean', not {pooling!r}")
    return replace(
        spec,
        pooling="cls" if pooling == "cls" else "mean",
        dense_bias=config.boolean("classifier_bias", False),
        norm="head.norm",
        norm_bias=config.boolean("norm_bias", False),
    )

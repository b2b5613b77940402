"""Fields of config.json shared by several model families."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypedDict

from neso.engine.specs.config_reader import ConfigReader, UnsupportedModel
from neso.engine.specs.decoder_spec import Activation
from neso.engine.specs.rotary_spec import RotarySpec, scaled_length

# Hugging Face's activation names.
ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "relu": "relu",
}


@dataclass(frozen=True, slots=True)
class Heads:
    """Counts and width of attention heads."""

    num_heads: int
    num_kv_heads: int
    head_dim: int


def read_heads(config: ConfigReader, kv_heads: int | None = None, head_dim: int | None = None) -> Heads:
    """Read the attention heads. Defaults are the family's.

    None: as many key-value heads as query heads, head_dim = hidden_size / heads.
    """
    hidden_size = config.integer("hidden_size")
    num_heads = config.integer("num_attention_heads")
    num_kv_heads = config.integer("num_key_value_heads", kv_heads or num_heads)
    if num_heads % num_kv_heads:
        raise config.invalid(
            "num_key_value_heads", f"({num_kv_heads}) does not divide {num_heads} attention heads"
        )
    if not config.has("head_dim") and head_dim is None:
        if hidden_size % num_heads:
            raise config.invalid(
                "hidden_size", f"({hidden_size}) is no multiple of {num_heads} attention heads"
            )
        head_dim = hidden_size // num_heads
    return Heads(num_heads, num_kv_heads, config.integer("head_dim", head_dim))


class Sizes(TypedDict):
    """`DecoderSpec` fields that most families read from the same config fields."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int


def read_sizes(config: ConfigReader, heads: Heads) -> Sizes:
    return Sizes(
        vocab_size=config.integer("vocab_size"),
        hidden_size=config.integer("hidden_size"),
        num_layers=config.integer("num_hidden_layers"),
        num_heads=heads.num_heads,
        num_kv_heads=heads.num_kv_heads,
        head_dim=heads.head_dim,
        intermediate_size=config.integer("intermediate_size"),
    )


def read_activation(config: ConfigReader, field: str = "hidden_act", default: str = "silu") -> Activation:
    name = config.string(field, default)
    if name not in ACTIVATIONS:
        raise UnsupportedModel(
            f"config field {field!r}: activation {name!r} is not supported; "
            f"supported are {', '.join(ACTIVATIONS)}"
        )
    return ACTIVATIONS[name]


def read_rotary(config: ConfigReader, head_dim: int, default_length: int) -> tuple[RotarySpec, int]:
    """Return the rotary embedding, and the maximum sequence length in tokens.

    The length is `max_position_embeddings`. With linear and dynamic scaling, that field is the length before scaling,
    as in vLLM. With YaRN it is the length after scaling, or before it if it equals `original_max_position_embeddings`.
    """
    max_position = config.integer("max_position_embeddings", default_length)
    rotary = RotarySpec.from_config(config, head_dim, max_position)
    return rotary, scaled_length(rotary.scaling, max_position)


def read_window_layers(config: ConfigReader, num_layers: int, period: int) -> tuple[bool, ...]:
    """Return for each layer whether it has a window: from `layer_types`, else all but every `period`-th layer."""
    if not config.has("layer_types"):
        return tuple((layer + 1) % period != 0 for layer in range(num_layers))
    kinds = config.strings("layer_types", num_layers)
    for kind in kinds:
        if kind not in ("full_attention", "sliding_attention"):
            raise UnsupportedModel(f"config field 'layer_types': {kind!r} is not supported")
    return tuple(kind == "sliding_attention" for kind in kinds)


def require_value(config: ConfigReader, field: str, supported: object) -> None:
    """Raise `UnsupportedModel` unless the field is absent or has the only supported value."""
    if config.has(field) and config.value(field) != supported:
        raise UnsupportedModel(
            f"config field {field!r}: {config.value(field)!r} is not supported, only {supported!r}"
        )


def read_qwen_windows(config: ConfigReader, num_layers: int) -> tuple[int | None, ...]:
    """Return the windows of Qwen 2 and 3, from `layer_types` or `max_window_layers`.

    There are none unless `use_sliding_window` is set.
    """
    enabled = config.boolean("use_sliding_window", False)
    window = config.integer("sliding_window", 4096) if enabled and _window_given(config) else None
    if not config.has("layer_types"):
        first = config.integer("max_window_layers", 28, minimum=0)
        return tuple(window if layer >= first else None for layer in range(num_layers))
    kinds = config.strings("layer_types", num_layers)
    for kind in kinds:
        if kind not in ("full_attention", "sliding_attention"):
            raise UnsupportedModel(f"config field 'layer_types': {kind!r} is not supported")
        if kind == "sliding_attention" and window is None:
            raise config.invalid("layer_types", "asks for sliding_attention, but there is no sliding window")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _window_given(config: ConfigReader) -> bool:
    """Whether a window applies: an absent `sliding_window` means the default, an explicit null disables the window."""
    return config.has("sliding_window") or not config.mentions("sliding_window")


QUANT_METHODS = ("gptq", "awq", "fp8", "compressed-tensors", "fbgemm_fp8")
"""Supported values of `quantization_config.quant_method`."""


def check_quantization(config: ConfigReader) -> None:
    """Raise `UnsupportedModel` for an unsupported quantization method."""
    if not config.has("quantization_config"):
        return
    method = config.section("quantization_config").value("quant_method")
    if method not in QUANT_METHODS:
        raise UnsupportedModel(
            f"config field 'quantization_config': checkpoints quantized with {method!r} are not supported"
        )

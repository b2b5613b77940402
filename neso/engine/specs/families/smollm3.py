"""SmolLM3: Llama whose every fourth layer does not rotate."""

from __future__ import annotations

from dataclasses import replace

from neso.engine.specs.config_fields import read_window_layers
from neso.engine.specs.config_reader import ConfigReader
from neso.engine.specs.decoder_spec import DecoderSpec
from neso.engine.specs.families import llama


def smollm3(config: ConfigReader) -> DecoderSpec:
    defaults = config.with_default("tie_word_embeddings", True).with_default("max_position_embeddings", 32768)
    spec = llama.llama(defaults.with_default("num_key_value_heads", 4))
    rotates = _read_rotating_layers(config, spec.num_layers)
    window = config.integer("sliding_window") if config.has("sliding_window") else None
    if not config.boolean("use_sliding_window", False) or window is None:
        windowed: tuple[bool, ...] = (False,) * spec.num_layers
    elif config.has("layer_types"):
        windowed = read_window_layers(config, spec.num_layers, period=1)
    else:
        windowed = tuple(not rotated for rotated in rotates)
    return replace(
        spec,
        family="smollm3",
        rotaries=tuple(
            rotary if rotated else None for rotary, rotated in zip(spec.rotaries, rotates, strict=True)
        ),
        sliding_windows=tuple(window if has_window else None for has_window in windowed),
    )


def _read_rotating_layers(config: ConfigReader, num_layers: int) -> tuple[bool, ...]:
    """Return for each layer whether it rotates: `no_rope_layers` has a 1 for layers that do."""
    if not config.has("no_rope_layers"):
        period = config.integer("no_rope_layer_interval", 4)
        return tuple((layer + 1) % period != 0 for layer in range(num_layers))
    flags = config.integers("no_rope_layers")
    if len(flags) != num_layers:
        raise config.invalid("no_rope_layers", f"must have {num_layers} entries, one per layer")
    return tuple(flag != 0 for flag in flags)

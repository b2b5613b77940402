"""Attention windows that the user asks for, beside those of the model."""

from __future__ import annotations

from dataclasses import replace
from itertools import cycle

from neso.engine.specs.decoder_spec import DecoderSpec


def limit_attention(
    spec: DecoderSpec, max_attention_window_size: int | list[int] | None, sink_token_length: int
) -> DecoderSpec:
    """The spec with windows of at most `max_attention_window_size` tokens, and attention sinks.

    A list has the sizes of the layers in turn, and begins again where it ends.
    The first `sink_token_length` tokens of a sequence stay in sight of layers that have a window; tokens keep their
    positions. Raises `ValueError` for a size below 1, or sinks without any window.
    """
    if max_attention_window_size is not None:
        sizes = (
            max_attention_window_size
            if isinstance(max_attention_window_size, list)
            else [max_attention_window_size]
        )
        if not sizes or min(sizes) < 1:
            raise ValueError(f"max_attention_window_size must be at least 1, got {max_attention_window_size}")
        windows = tuple(
            window if size >= (window or spec.max_position) else size
            for window, size in zip(spec.sliding_windows, cycle(sizes), strict=False)
        )
        spec = replace(spec, sliding_windows=windows)
    if not sink_token_length:
        return spec
    if sink_token_length < 0:
        raise ValueError(f"sink_token_length must be at least 0, got {sink_token_length}")
    if not any(spec.sliding_windows):
        raise ValueError(
            "sink_token_length needs a model with a sliding window, or max_attention_window_size"
        )
    return replace(spec, sink_tokens=sink_token_length)

"""The tensors of a model that turns text into vectors."""

from __future__ import annotations

from typing import Any

from neso.backends.request_tensors import TensorField, add_inputs, add_outputs

INPUTS = (
    TensorField("text_input", "TYPE_STRING", (-1,)),
    TensorField("text_pair", "TYPE_STRING", (-1,), optional=True),
    TensorField("dimensions", "TYPE_INT32", optional=True),
    TensorField("normalize", "TYPE_BOOL", optional=True),
    TensorField("truncate", "TYPE_BOOL", optional=True),
)
"""`text_pair`: the second text of each pair, for scores."""

OUTPUTS = (
    TensorField("embedding", "TYPE_FP32", (-1, -1)),
    TensorField("score", "TYPE_FP32", (-1,)),
    TensorField("probabilities", "TYPE_FP32", (-1, -1)),
    TensorField("num_input_tokens", "TYPE_UINT32", (-1,)),
)
"""`score` comes with `text_pair`, else `embedding`; `probabilities` (of classes) when asked for."""


def complete(config: Any) -> None:
    """Add the inputs and outputs that the `ModelConfig` does not name."""
    config.max_batch_size = 0
    add_inputs(config, INPUTS)
    add_outputs(config, OUTPUTS)

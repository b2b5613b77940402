"""The tensors of a model on vLLM, by the names and shapes of Triton's backend."""

from __future__ import annotations

from typing import Any

from neso.backends.request_tensors import TensorField, add_inputs, add_outputs

WANTED = ("finish_reason", "cumulative_logprob", "logprobs", "num_input_tokens", "num_output_tokens")
"""Outputs that an input `return_…` asks for."""

INPUTS = (
    TensorField("text_input", "TYPE_STRING"),
    TensorField("image", "TYPE_STRING", (-1,), optional=True),
    TensorField("stream", "TYPE_BOOL", optional=True),
    TensorField("sampling_parameters", "TYPE_STRING", optional=True),
    TensorField("exclude_input_in_output", "TYPE_BOOL", optional=True),
    *(TensorField(f"return_{name}", "TYPE_BOOL", optional=True) for name in WANTED),
    TensorField("embedding_request", "TYPE_STRING", optional=True),
)
"""`image`: base64 of the files."""

OUTPUTS = (
    TensorField("text_output", "TYPE_STRING", (-1,)),
    TensorField("finish_reason", "TYPE_STRING", (-1,)),
    TensorField("cumulative_logprob", "TYPE_FP32", (-1,)),
    TensorField("logprobs", "TYPE_STRING", (-1,)),
    TensorField("num_input_tokens", "TYPE_UINT32"),
    TensorField("num_output_tokens", "TYPE_UINT32", (-1,)),
)
"""One element a sequence, where the extent is -1."""


def complete(config: Any) -> None:
    """Add the inputs and outputs that the `ModelConfig` does not name; make the model decoupled, without batches."""
    config.model_transaction_policy.decoupled = True
    config.max_batch_size = 0
    add_inputs(config, INPUTS)
    add_outputs(config, OUTPUTS)

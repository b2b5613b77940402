"""The tensors of a model on vLLM, by the names and shapes of Triton's backend."""

from __future__ import annotations

from typing import Any

WANTED = ("finish_reason", "cumulative_logprob", "logprobs", "num_input_tokens", "num_output_tokens")
"""Outputs that an input `return_…` asks for."""

INPUTS: tuple[tuple[str, str, int, bool], ...] = (
    ("text_input", "TYPE_STRING", 1, False),
    ("image", "TYPE_STRING", -1, True),
    ("stream", "TYPE_BOOL", 1, True),
    ("sampling_parameters", "TYPE_STRING", 1, True),
    ("exclude_input_in_output", "TYPE_BOOL", 1, True),
    *((f"return_{name}", "TYPE_BOOL", 1, True) for name in WANTED),
    ("embedding_request", "TYPE_STRING", 1, True),
)
"""Name, type, extent, whether it may be left out. `image`: base64 of the files."""

OUTPUTS = (
    ("text_output", "TYPE_STRING", -1),
    ("finish_reason", "TYPE_STRING", -1),
    ("cumulative_logprob", "TYPE_FP32", -1),
    ("logprobs", "TYPE_STRING", -1),
    ("num_input_tokens", "TYPE_UINT32", 1),
    ("num_output_tokens", "TYPE_UINT32", -1),
)
"""Name, type, extent: one element a sequence, where it is -1."""


def complete(config: Any) -> None:
    """Add the inputs and outputs that the `ModelConfig` does not name; make the model decoupled, without batches."""
    from tritonclient.grpc import model_config_pb2 as pb

    data_type = pb.DataType.Value
    named = {tensor.name for tensor in (*config.input, *config.output)}
    for name, type_name, extent, optional in INPUTS:
        if name not in named:
            config.input.add(name=name, data_type=data_type(type_name), dims=[extent], optional=optional)
    for name, type_name, extent in OUTPUTS:
        if name not in named:
            config.output.add(name=name, data_type=data_type(type_name), dims=[extent])
    config.model_transaction_policy.decoupled = True
    config.max_batch_size = 0

"""The tensors of a language model; the names and shapes are those of Triton's vLLM backend."""

from __future__ import annotations

from typing import Any

from neso.backends.tensor_fields import TensorField, add_inputs, add_outputs

VECTORS = ("prompt_embedding_table", "prompt_embeds")
"""Inputs [rows, hidden_size]."""
IMAGE = "image"
"""Input [images], base64 of the files."""

INPUTS = (
    TensorField("text_input", "TYPE_STRING"),
    TensorField("stream", "TYPE_BOOL", optional=True),
    TensorField("sampling_parameters", "TYPE_STRING", optional=True),
    TensorField("exclude_input_in_output", "TYPE_BOOL", optional=True),
    TensorField("return_finish_reason", "TYPE_BOOL", optional=True),
    TensorField("return_cumulative_logprob", "TYPE_BOOL", optional=True),
    TensorField("return_logprobs", "TYPE_BOOL", optional=True),
    TensorField("return_num_input_tokens", "TYPE_BOOL", optional=True),
    TensorField("return_num_output_tokens", "TYPE_BOOL", optional=True),
    TensorField("return_context_logits", "TYPE_BOOL", optional=True),
    TensorField("return_generation_logits", "TYPE_BOOL", optional=True),
    TensorField("prompt_vocab_size", "TYPE_INT32", optional=True),
    TensorField(IMAGE, "TYPE_STRING", (-1,), optional=True),
    # TensorRT-LLM's, for an adapter; for weights of another type, config.pbtxt names the input.
    TensorField("lora_task_id", "TYPE_UINT64", optional=True),
    TensorField("lora_weights", "TYPE_FP16", (-1, -1), optional=True),
    TensorField("lora_config", "TYPE_INT32", (-1, 3), optional=True),
    *(TensorField(name, "TYPE_FP32", (-1, -1), optional=True) for name in VECTORS),
    # TensorRT-LLM's, for guessed tokens.
    TensorField("draft_input_ids", "TYPE_INT32", (-1,), optional=True),
    TensorField("draft_logits", "TYPE_FP32", (-1, -1), optional=True),
    TensorField("draft_acceptance_threshold", "TYPE_FP32", optional=True),
)

OUTPUTS = (
    TensorField("text_output", "TYPE_STRING", (-1,)),
    TensorField("finish_reason", "TYPE_STRING", (-1,)),
    TensorField("cumulative_logprob", "TYPE_FP32", (-1,)),
    TensorField("logprobs", "TYPE_STRING", (-1,)),
    TensorField("num_input_tokens", "TYPE_UINT32"),
    TensorField("num_output_tokens", "TYPE_UINT32", (-1,)),
    TensorField("context_logits", "TYPE_FP32", (-1, -1)),
    TensorField("generation_logits", "TYPE_FP32", (-1, -1, -1)),
    TensorField("total_draft_tokens", "TYPE_INT32"),
    TensorField("total_accepted_draft_tokens", "TYPE_INT32"),
    TensorField("acceptance_rate", "TYPE_FP32"),
)
"""One element a sequence; [prompt, vocabulary] and [sequence, token, vocabulary] of logits."""


def complete(config: Any) -> None:
    """Add the inputs and outputs that the `ModelConfig` does not name, and make the model decoupled."""
    config.model_transaction_policy.decoupled = True
    config.max_batch_size = 0
    add_inputs(config, INPUTS)
    add_outputs(config, OUTPUTS)

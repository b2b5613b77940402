"""The tensors of the layout's models."""

from __future__ import annotations

from dataclasses import dataclass

from neso.backends.request_tensors import TensorField
from neso.backends.tensorrtllm import signature

PREPROCESSING_INPUTS = (
    TensorField("QUERY", "TYPE_STRING"),
    TensorField("DECODER_QUERY", "TYPE_STRING", optional=True),
    TensorField("REQUEST_OUTPUT_LEN", "TYPE_INT32"),
    TensorField("BAD_WORDS_DICT", "TYPE_STRING", (-1,), optional=True),
    TensorField("STOP_WORDS_DICT", "TYPE_STRING", (-1,), optional=True),
    TensorField("EMBEDDING_BIAS_WORDS", "TYPE_STRING", (-1,), optional=True),
    TensorField("EMBEDDING_BIAS_WEIGHTS", "TYPE_FP32", (-1,), optional=True),
    TensorField("END_ID", "TYPE_INT32", optional=True),
    TensorField("PAD_ID", "TYPE_INT32", optional=True),
    TensorField("PROMPT_TABLE_EXTRA_ID", "TYPE_UINT64", optional=True),
)
PREPROCESSING_OUTPUTS = (
    TensorField("INPUT_ID", "TYPE_INT32", (-1,)),
    TensorField("REQUEST_INPUT_LEN", "TYPE_INT32"),
    TensorField("DECODER_INPUT_ID", "TYPE_INT32", (-1,)),
    TensorField("REQUEST_DECODER_INPUT_LEN", "TYPE_INT32"),
    TensorField("BAD_WORDS_IDS", "TYPE_INT32", (2, -1)),
    TensorField("STOP_WORDS_IDS", "TYPE_INT32", (2, -1)),
    TensorField("EMBEDDING_BIAS", "TYPE_FP32", (-1,)),
    TensorField("REQUEST_OUTPUT_LEN", "TYPE_INT32", (-1,)),
    TensorField("OUT_END_ID", "TYPE_INT32"),
    TensorField("OUT_PAD_ID", "TYPE_INT32"),
    TensorField("OUT_PROMPT_TABLE_EXTRA_IDS", "TYPE_UINT64", (-1,)),
)

_PASSED_ON = (
    ("CUM_LOG_PROBS", (-1,)),
    ("OUTPUT_LOG_PROBS", (-1, -1)),
    ("CONTEXT_LOGITS", (-1, -1)),
    ("GENERATION_LOGITS", (-1, -1, -1)),
)
"""What ensembles of older versions lead through postprocessing; the outputs begin with OUT_."""
POSTPROCESSING_INPUTS = (
    TensorField("TOKENS_BATCH", "TYPE_INT32", (-1, -1)),
    TensorField("SEQUENCE_LENGTH", "TYPE_INT32", (-1,)),
    TensorField("PRECEDING_IDS", "TYPE_INT32", (-1,), optional=True),
    *(TensorField(name, "TYPE_FP32", dims, optional=True) for name, dims in _PASSED_ON),
)
POSTPROCESSING_OUTPUTS = (
    TensorField("OUTPUT", "TYPE_STRING", (-1,)),
    *(TensorField(f"OUT_{name}", "TYPE_FP32", dims) for name, dims in _PASSED_ON),
)


@dataclass(frozen=True, slots=True)
class TextInput:
    """An input of the models that take text, and which input of preprocessing or of tensorrt_llm it becomes."""

    field: TensorField
    preprocessing: str = ""
    generation: str = ""


def _word(
    name: str, becomes: str, data_type: str = "TYPE_STRING", *, dims: tuple[int, ...] = (-1,)
) -> TextInput:
    return TextInput(TensorField(name, data_type, dims, optional=True), preprocessing=becomes)


def _value(name: str, data_type: str, becomes: str = "", *, dims: tuple[int, ...] = (1,)) -> TextInput:
    return TextInput(TensorField(name, data_type, dims, optional=True), generation=becomes or name)


TEXT_INPUTS = (
    TextInput(TensorField("text_input", "TYPE_STRING"), preprocessing="QUERY"),
    _word("decoder_text_input", "DECODER_QUERY", dims=(1,)),
    TextInput(TensorField("max_tokens", "TYPE_INT32"), preprocessing="REQUEST_OUTPUT_LEN"),
    _word("bad_words", "BAD_WORDS_DICT"),
    _word("stop_words", "STOP_WORDS_DICT"),
    _word("embedding_bias_words", "EMBEDDING_BIAS_WORDS"),
    _word("embedding_bias_weights", "EMBEDDING_BIAS_WEIGHTS", "TYPE_FP32"),
    _word("end_id", "END_ID", "TYPE_INT32", dims=(1,)),
    _word("pad_id", "PAD_ID", "TYPE_INT32", dims=(1,)),
    _word("prompt_table_extra_id", "PROMPT_TABLE_EXTRA_ID", "TYPE_UINT64", dims=(1,)),
    _value("num_return_sequences", "TYPE_INT32"),
    _value("exclude_input_in_output", "TYPE_BOOL"),
    _value("stream", "TYPE_BOOL", "streaming"),
    _value("beam_width", "TYPE_INT32"),
    _value("temperature", "TYPE_FP32"),
    _value("top_k", "TYPE_INT32", "runtime_top_k"),
    _value("top_p", "TYPE_FP32", "runtime_top_p"),
    _value("length_penalty", "TYPE_FP32", "len_penalty"),
    _value("repetition_penalty", "TYPE_FP32"),
    _value("min_length", "TYPE_INT32"),
    _value("min_tokens", "TYPE_INT32"),
    _value("presence_penalty", "TYPE_FP32"),
    _value("frequency_penalty", "TYPE_FP32"),
    _value("random_seed", "TYPE_UINT64"),
    _value("seed", "TYPE_UINT64"),
    _value("return_log_probs", "TYPE_BOOL"),
    _value("return_context_logits", "TYPE_BOOL"),
    _value("return_generation_logits", "TYPE_BOOL"),
    _value("return_perf_metrics", "TYPE_BOOL"),
    _value("return_num_input_tokens", "TYPE_BOOL"),
    _value("return_num_output_tokens", "TYPE_BOOL"),
    _value("prompt_embedding_table", "TYPE_FP16", dims=(-1, -1)),
    _value("prompt_vocab_size", "TYPE_INT32"),
    _value("lora_task_id", "TYPE_UINT64"),
    _value("lora_weights", "TYPE_FP16", dims=(-1, -1)),
    _value("lora_config", "TYPE_INT32", dims=(-1, 3)),
    _value("guided_decoding_guide_type", "TYPE_STRING"),
    _value("guided_decoding_guide", "TYPE_STRING"),
)
"""Of ensemble and tensorrt_llm_bls."""
DRAFT_INPUTS = (
    TensorField("num_draft_tokens", "TYPE_INT32", optional=True),
    TensorField("use_draft_logits", "TYPE_BOOL", optional=True),
)
"""What tensorrt_llm_bls has beside them, for speculative decoding."""

_TOKEN_OUTPUTS = ("output_ids", "sequence_length", "preceding_ids")
PASSED_OUTPUTS = tuple(field for field in signature.OUTPUTS if field.name not in _TOKEN_OUTPUTS)
"""Outputs of tensorrt_llm that ensemble and tensorrt_llm_bls hand on, where they were asked for."""
TEXT_OUTPUTS = (TensorField("text_output", "TYPE_STRING", (-1,)), *PASSED_OUTPUTS)

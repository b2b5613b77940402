"""The tensors of the layout's models."""

from __future__ import annotations

from dataclasses import dataclass

from neso.backends.tensor_fields import TensorField as ModelTensor
from neso.backends.tensorrtllm import signature
from neso.layouts.pbtxt import TensorField

PREPROCESSING_INPUTS = (
    TensorField("QUERY", "STRING"),
    TensorField("DECODER_QUERY", "STRING", optional=True),
    TensorField("REQUEST_OUTPUT_LEN", "INT32"),
    TensorField("BAD_WORDS_DICT", "STRING", (-1,), optional=True),
    TensorField("STOP_WORDS_DICT", "STRING", (-1,), optional=True),
    TensorField("EMBEDDING_BIAS_WORDS", "STRING", (-1,), optional=True),
    TensorField("EMBEDDING_BIAS_WEIGHTS", "FP32", (-1,), optional=True),
    TensorField("END_ID", "INT32", optional=True),
    TensorField("PAD_ID", "INT32", optional=True),
    TensorField("PROMPT_TABLE_EXTRA_ID", "UINT64", optional=True),
)
PREPROCESSING_OUTPUTS = (
    TensorField("INPUT_ID", "INT32", (-1,)),
    TensorField("REQUEST_INPUT_LEN", "INT32"),
    TensorField("DECODER_INPUT_ID", "INT32", (-1,)),
    TensorField("REQUEST_DECODER_INPUT_LEN", "INT32"),
    TensorField("BAD_WORDS_IDS", "INT32", (2, -1)),
    TensorField("STOP_WORDS_IDS", "INT32", (2, -1)),
    TensorField("EMBEDDING_BIAS", "FP32", (-1,)),
    TensorField("REQUEST_OUTPUT_LEN", "INT32", (-1,)),
    TensorField("OUT_END_ID", "INT32"),
    TensorField("OUT_PAD_ID", "INT32"),
    TensorField("OUT_PROMPT_TABLE_EXTRA_IDS", "UINT64", (-1,)),
)

_PASSED_ON = (
    ("CUM_LOG_PROBS", (-1,)),
    ("OUTPUT_LOG_PROBS", (-1, -1)),
    ("CONTEXT_LOGITS", (-1, -1)),
    ("GENERATION_LOGITS", (-1, -1, -1)),
)
"""What ensembles of older versions lead through postprocessing; the outputs begin with OUT_."""
POSTPROCESSING_INPUTS = (
    TensorField("TOKENS_BATCH", "INT32", (-1, -1)),
    TensorField("SEQUENCE_LENGTH", "INT32", (-1,)),
    TensorField("PRECEDING_IDS", "INT32", (-1,), optional=True),
    *(TensorField(name, "FP32", dims, optional=True) for name, dims in _PASSED_ON),
)
POSTPROCESSING_OUTPUTS = (
    TensorField("OUTPUT", "STRING", (-1,)),
    *(TensorField(f"OUT_{name}", "FP32", dims) for name, dims in _PASSED_ON),
)


@dataclass(frozen=True, slots=True)
class TextInput:
    """An input of the models that take text, and which input of preprocessing or of tensorrt_llm it becomes."""

    field: TensorField
    preprocessing: str = ""
    generation: str = ""


def _word(name: str, becomes: str, data_type: str = "STRING", *, dims: tuple[int, ...] = (-1,)) -> TextInput:
    return TextInput(TensorField(name, data_type, dims, optional=True), preprocessing=becomes)


def _value(name: str, data_type: str, becomes: str = "", *, dims: tuple[int, ...] = (1,)) -> TextInput:
    return TextInput(TensorField(name, data_type, dims, optional=True), generation=becomes or name)


TEXT_INPUTS = (
    TextInput(TensorField("text_input", "STRING"), preprocessing="QUERY"),
    _word("decoder_text_input", "DECODER_QUERY", dims=(1,)),
    TextInput(TensorField("max_tokens", "INT32"), preprocessing="REQUEST_OUTPUT_LEN"),
    _word("bad_words", "BAD_WORDS_DICT"),
    _word("stop_words", "STOP_WORDS_DICT"),
    _word("embedding_bias_words", "EMBEDDING_BIAS_WORDS"),
    _word("embedding_bias_weights", "EMBEDDING_BIAS_WEIGHTS", "FP32"),
    _word("end_id", "END_ID", "INT32", dims=(1,)),
    _word("pad_id", "PAD_ID", "INT32", dims=(1,)),
    _word("prompt_table_extra_id", "PROMPT_TABLE_EXTRA_ID", "UINT64", dims=(1,)),
    _value("num_return_sequences", "INT32"),
    _value("exclude_input_in_output", "BOOL"),
    _value("stream", "BOOL", "streaming"),
    _value("beam_width", "INT32"),
    _value("temperature", "FP32"),
    _value("top_k", "INT32", "runtime_top_k"),
    _value("top_p", "FP32", "runtime_top_p"),
    _value("length_penalty", "FP32", "len_penalty"),
    _value("repetition_penalty", "FP32"),
    _value("min_length", "INT32"),
    _value("min_tokens", "INT32"),
    _value("presence_penalty", "FP32"),
    _value("frequency_penalty", "FP32"),
    _value("random_seed", "UINT64"),
    _value("seed", "UINT64"),
    _value("return_log_probs", "BOOL"),
    _value("return_context_logits", "BOOL"),
    _value("return_generation_logits", "BOOL"),
    _value("return_perf_metrics", "BOOL"),
    _value("return_num_input_tokens", "BOOL"),
    _value("return_num_output_tokens", "BOOL"),
    _value("prompt_embedding_table", "FP16", dims=(-1, -1)),
    _value("prompt_vocab_size", "INT32"),
    _value("lora_task_id", "UINT64"),
    _value("lora_weights", "FP16", dims=(-1, -1)),
    _value("lora_config", "INT32", dims=(-1, 3)),
    _value("guided_decoding_guide_type", "STRING"),
    _value("guided_decoding_guide", "STRING"),
)
"""Of ensemble and tensorrt_llm_bls."""
DRAFT_INPUTS = (
    TensorField("num_draft_tokens", "INT32", optional=True),
    TensorField("use_draft_logits", "BOOL", optional=True),
)
"""What tensorrt_llm_bls has beside them, for speculative decoding."""

_TOKEN_OUTPUTS = ("output_ids", "sequence_length", "preceding_ids")


def _field(field: ModelTensor, *, batches: bool) -> TensorField:
    ragged, scalar = batches and field.ragged, batches and field.scalar
    data_type = field.data_type.removeprefix("TYPE_")
    return TensorField(field.name, data_type, field.dims, field.optional, ragged, scalar)


def generation_inputs(*, batches: bool) -> tuple[TensorField, ...]:
    """Of tensorrt_llm."""
    return tuple(_field(field, batches=batches) for field in signature.INPUTS)


GENERATION_OUTPUTS = tuple(
    TensorField(field.name, field.data_type.removeprefix("TYPE_"), field.dims) for field in signature.OUTPUTS
)
PASSED_OUTPUTS = tuple(field for field in GENERATION_OUTPUTS if field.name not in _TOKEN_OUTPUTS)
"""Outputs of tensorrt_llm that ensemble and tensorrt_llm_bls hand on, where they were asked for."""
TEXT_OUTPUTS = (TensorField("text_output", "STRING", (-1,)), *PASSED_OUTPUTS)

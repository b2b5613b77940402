"""TensorRT-LLM's repository layout: preprocessing, tensorrt_llm, postprocessing, ensemble and tensorrt_llm_bls."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from neso.backends.request_tensors import TensorField
from neso.backends.tensorrtllm import signature
from neso.layouts import pbtxt
from neso.layouts.trtllm_options import TrtllmOptions

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
"""Tensors that older ensembles pass through postprocessing; the outputs are prefixed with OUT_."""
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
    """An input of ensemble and tensorrt_llm_bls, and the mapped input of preprocessing or tensorrt_llm."""

    field: TensorField
    preprocessing: str = ""
    generation: str = ""


def _to_preprocessing(
    name: str, target: str, data_type: str = "TYPE_STRING", *, dims: tuple[int, ...] = (-1,)
) -> TextInput:
    return TextInput(TensorField(name, data_type, dims, optional=True), preprocessing=target)


def _to_generation(name: str, data_type: str, target: str = "", *, dims: tuple[int, ...] = (1,)) -> TextInput:
    return TextInput(TensorField(name, data_type, dims, optional=True), generation=target or name)


TEXT_INPUTS = (
    TextInput(TensorField("text_input", "TYPE_STRING"), preprocessing="QUERY"),
    _to_preprocessing("decoder_text_input", "DECODER_QUERY", dims=(1,)),
    TextInput(TensorField("max_tokens", "TYPE_INT32"), preprocessing="REQUEST_OUTPUT_LEN"),
    _to_preprocessing("bad_words", "BAD_WORDS_DICT"),
    _to_preprocessing("stop_words", "STOP_WORDS_DICT"),
    _to_preprocessing("embedding_bias_words", "EMBEDDING_BIAS_WORDS"),
    _to_preprocessing("embedding_bias_weights", "EMBEDDING_BIAS_WEIGHTS", "TYPE_FP32"),
    _to_preprocessing("end_id", "END_ID", "TYPE_INT32", dims=(1,)),
    _to_preprocessing("pad_id", "PAD_ID", "TYPE_INT32", dims=(1,)),
    _to_preprocessing("prompt_table_extra_id", "PROMPT_TABLE_EXTRA_ID", "TYPE_UINT64", dims=(1,)),
    _to_generation("num_return_sequences", "TYPE_INT32"),
    _to_generation("exclude_input_in_output", "TYPE_BOOL"),
    _to_generation("stream", "TYPE_BOOL", "streaming"),
    _to_generation("beam_width", "TYPE_INT32"),
    _to_generation("temperature", "TYPE_FP32"),
    _to_generation("top_k", "TYPE_INT32", "runtime_top_k"),
    _to_generation("top_p", "TYPE_FP32", "runtime_top_p"),
    _to_generation("length_penalty", "TYPE_FP32"),
    _to_generation("len_penalty", "TYPE_FP32"),
    _to_generation("repetition_penalty", "TYPE_FP32"),
    _to_generation("min_length", "TYPE_INT32"),
    _to_generation("min_tokens", "TYPE_INT32"),
    _to_generation("presence_penalty", "TYPE_FP32"),
    _to_generation("frequency_penalty", "TYPE_FP32"),
    _to_generation("random_seed", "TYPE_UINT64"),
    _to_generation("seed", "TYPE_UINT64"),
    _to_generation("return_log_probs", "TYPE_BOOL"),
    _to_generation("return_context_logits", "TYPE_BOOL"),
    _to_generation("return_generation_logits", "TYPE_BOOL"),
    _to_generation("return_perf_metrics", "TYPE_BOOL"),
    _to_generation("return_num_input_tokens", "TYPE_BOOL"),
    _to_generation("return_num_output_tokens", "TYPE_BOOL"),
    _to_generation("prompt_embedding_table", "TYPE_FP16", dims=(-1, -1)),
    _to_generation("prompt_vocab_size", "TYPE_INT32"),
    _to_generation("lora_task_id", "TYPE_UINT64"),
    _to_generation("lora_weights", "TYPE_FP16", dims=(-1, -1)),
    _to_generation("lora_config", "TYPE_INT32", dims=(-1, 3)),
    _to_generation("guided_decoding_guide_type", "TYPE_STRING"),
    _to_generation("guided_decoding_guide", "TYPE_STRING"),
    _to_generation("logits_post_processor_name", "TYPE_STRING"),
)
"""Inputs of ensemble and tensorrt_llm_bls."""
DRAFT_INPUTS = (
    TensorField("num_draft_tokens", "TYPE_INT32", optional=True),
    TensorField("use_draft_logits", "TYPE_BOOL", optional=True),
)
"""Additional inputs of tensorrt_llm_bls, for speculative decoding."""

_TOKEN_OUTPUTS = ("output_ids", "sequence_length", "preceding_ids")
PASSED_OUTPUTS = tuple(field for field in signature.OUTPUTS if field.name not in _TOKEN_OUTPUTS)
"""Outputs of tensorrt_llm that ensemble and tensorrt_llm_bls pass through when requested."""
TEXT_OUTPUTS = (TensorField("text_output", "TYPE_STRING", (-1,)), *PASSED_OUTPUTS)


PREPROCESSING, POSTPROCESSING = "preprocessing", "postprocessing"
GENERATION, DRAFT = "tensorrt_llm", "tensorrt_llm_draft"
ENSEMBLE, BLS = "ensemble", "tensorrt_llm_bls"


def preprocessing_config(options: TrtllmOptions) -> str:
    """Return config.pbtxt of preprocessing (text to token ids)."""
    return (
        _header(PREPROCESSING, 'backend: "python"', options)
        + pbtxt.instances(options.instances)
        + pbtxt.parameters(
            {
                "tokenizer_dir": options.tokenizer,
                "tokenizer_type": "auto",
                "add_special_tokens": pbtxt.boolean(options.add_special_tokens),
                "gpt_model_path": options.model,
            }
        )
        + pbtxt.tensors("input", PREPROCESSING_INPUTS)
        + pbtxt.tensors("output", PREPROCESSING_OUTPUTS)
    )


def postprocessing_config(options: TrtllmOptions) -> str:
    """Return config.pbtxt of postprocessing (token ids to text)."""
    return (
        _header(POSTPROCESSING, 'backend: "python"', options)
        + pbtxt.instances(options.instances)
        + pbtxt.parameters(
            {
                "tokenizer_dir": options.tokenizer,
                "tokenizer_type": "auto",
                "skip_special_tokens": pbtxt.boolean(options.skip_special_tokens),
            }
        )
        + pbtxt.tensors("input", POSTPROCESSING_INPUTS)
        + pbtxt.tensors("output", POSTPROCESSING_OUTPUTS)
    )


def generation_config(options: TrtllmOptions, *, draft: bool = False) -> str:
    """Return config.pbtxt of tensorrt_llm, or of the draft model for speculative decoding."""
    limits = {
        "max_tokens_in_paged_kv_cache": options.kv_cache_tokens,
        "kv_cache_free_gpu_mem_fraction": options.kv_cache_free_gpu_mem_fraction,
    }
    values = {
        "gpt_model_type": "inflight_fused_batching",
        "gpt_model_path": (options.draft_model or "") if draft else options.model,
        "tokenizer_dir": options.tokenizer,
        "batch_scheduler_policy": options.batch_scheduler_policy.value,
        "max_beam_width": str(options.max_beam_width),
        "exclude_input_in_output": pbtxt.boolean(options.exclude_input_in_output),
        "enable_chunked_context": pbtxt.boolean(options.enable_chunked_context),
        **{name: str(value) for name, value in limits.items() if value is not None},
        **options.parameters,
    }
    return (
        _header(DRAFT if draft else GENERATION, 'backend: "tensorrtllm"', options)
        + pbtxt.decoupled(options.decoupled and not draft)
        + pbtxt.instances(1)
        + pbtxt.parameters(values)
        + pbtxt.tensors("input", signature.INPUTS, batches=options.max_batch_size > 0)
        + pbtxt.tensors("output", signature.OUTPUTS)
    )


def ensemble_config(options: TrtllmOptions) -> str:
    """Return config.pbtxt of ensemble: preprocessing, tensorrt_llm and postprocessing as a dataflow graph."""
    return (
        _header(ENSEMBLE, 'platform: "ensemble"', options)
        + pbtxt.decoupled(options.decoupled)
        + pbtxt.tensors("input", [text.field for text in TEXT_INPUTS])
        + pbtxt.tensors("output", TEXT_OUTPUTS)
        + pbtxt.ensemble_scheduling((_preprocessing_step(), _generation_step(), _postprocessing_step()))
    )


def bls_config(options: TrtllmOptions) -> str:
    """Return config.pbtxt of tensorrt_llm_bls: the same chain as a Python model."""
    return (
        _header(BLS, 'backend: "python"', options)
        + pbtxt.decoupled(options.decoupled)
        + pbtxt.instances(1)
        + pbtxt.parameters(
            {
                "accumulate_tokens": pbtxt.boolean(options.accumulate_tokens),
                "tensorrt_llm_model_name": GENERATION,
                "tensorrt_llm_draft_model_name": DRAFT if options.draft_model else "",
                "preprocessing_model_name": PREPROCESSING,
                "postprocessing_model_name": POSTPROCESSING,
            }
        )
        + pbtxt.tensors("input", [*(text.field for text in TEXT_INPUTS), *DRAFT_INPUTS])
        + pbtxt.tensors("output", TEXT_OUTPUTS)
    )


_FROM_PREPROCESSING: Mapping[str, str] = {
    "input_ids": "INPUT_ID",
    "input_lengths": "REQUEST_INPUT_LEN",
    "request_output_len": "REQUEST_OUTPUT_LEN",
    "decoder_input_ids": "DECODER_INPUT_ID",
    "decoder_input_lengths": "REQUEST_DECODER_INPUT_LEN",
    "bad_words_list": "BAD_WORDS_IDS",
    "stop_words_list": "STOP_WORDS_IDS",
    "embedding_bias": "EMBEDDING_BIAS",
    "end_id": "OUT_END_ID",
    "pad_id": "OUT_PAD_ID",
    "prompt_table_extra_ids": "OUT_PROMPT_TABLE_EXTRA_IDS",
}
"""Input of tensorrt_llm -> output of preprocessing."""
_TO_POSTPROCESSING = {
    "TOKENS_BATCH": ("output_ids", "_TOKENS_BATCH"),
    "SEQUENCE_LENGTH": ("sequence_length", "_SEQUENCE_LENGTH"),
    "PRECEDING_IDS": ("preceding_ids", "_PRECEDING_IDS"),
}
"""Input of postprocessing -> (output of tensorrt_llm, tensor name in the ensemble)."""


def _preprocessing_step() -> pbtxt.EnsembleStep:
    inputs = {text.preprocessing: text.field.name for text in TEXT_INPUTS if text.preprocessing}
    outputs = {name: f"_{name}" for name in _FROM_PREPROCESSING.values()}
    return pbtxt.EnsembleStep(PREPROCESSING, inputs, outputs)


def _generation_step() -> pbtxt.EnsembleStep:
    inputs = {name: f"_{output}" for name, output in _FROM_PREPROCESSING.items()}
    inputs |= {text.generation: text.field.name for text in TEXT_INPUTS if text.generation}
    outputs = dict(_TO_POSTPROCESSING.values()) | {field.name: field.name for field in PASSED_OUTPUTS}
    return pbtxt.EnsembleStep(GENERATION, inputs, outputs)


def _postprocessing_step() -> pbtxt.EnsembleStep:
    inputs = {name: tensor for name, (_, tensor) in _TO_POSTPROCESSING.items()}
    return pbtxt.EnsembleStep(POSTPROCESSING, inputs, {"OUTPUT": "text_output"})


def _header(name: str, implementation: str, options: TrtllmOptions) -> str:
    return f"name: {pbtxt.quoted(name)}\n{implementation}\nmax_batch_size: {options.max_batch_size}\n"


MODELS = Path(__file__).parent / "trtllm_models"
"""Python models that are copied into the repository."""


def trtllm_files(options: TrtllmOptions) -> dict[str, str]:
    """Return the files of the layout: contents by path in the repository."""
    configs = {
        PREPROCESSING: preprocessing_config(options),
        GENERATION: generation_config(options),
        POSTPROCESSING: postprocessing_config(options),
        ENSEMBLE: ensemble_config(options),
        BLS: bls_config(options),
    }
    if options.draft_model:
        configs[DRAFT] = generation_config(options, draft=True)
    files = {f"{name}/config.pbtxt": config for name, config in configs.items()}
    for name in (PREPROCESSING, POSTPROCESSING, BLS):
        files |= {f"{name}/1/{path.name}": path.read_text() for path in sorted((MODELS / name).glob("*.py"))}
    # Version folders must exist; git does not store empty folders.
    for name in (GENERATION, ENSEMBLE, DRAFT):
        if name in configs:
            files[f"{name}/1/README"] = "The version folder of a model whose files are elsewhere.\n"
    return files

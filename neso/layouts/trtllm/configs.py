"""The config.pbtxt of each model."""

from __future__ import annotations

from collections.abc import Mapping

from neso.backends.tensorrtllm import signature
from neso.layouts import pbtxt
from neso.layouts.trtllm import tensors
from neso.layouts.trtllm.options import TrtllmOptions

PREPROCESSING, POSTPROCESSING = "preprocessing", "postprocessing"
GENERATION, DRAFT = "tensorrt_llm", "tensorrt_llm_draft"
ENSEMBLE, BLS = "ensemble", "tensorrt_llm_bls"


def preprocessing(options: TrtllmOptions) -> str:
    """Text to token ids."""
    return (
        _head(PREPROCESSING, 'backend: "python"', options)
        + pbtxt.instances(options.instances)
        + pbtxt.parameters(
            {
                "tokenizer_dir": options.tokenizer,
                "tokenizer_type": "auto",
                "add_special_tokens": pbtxt.truth(options.add_special_tokens),
                "gpt_model_path": options.model,
            }
        )
        + pbtxt.tensors("input", tensors.PREPROCESSING_INPUTS)
        + pbtxt.tensors("output", tensors.PREPROCESSING_OUTPUTS)
    )


def postprocessing(options: TrtllmOptions) -> str:
    """Token ids to text."""
    return (
        _head(POSTPROCESSING, 'backend: "python"', options)
        + pbtxt.instances(options.instances)
        + pbtxt.parameters(
            {
                "tokenizer_dir": options.tokenizer,
                "tokenizer_type": "auto",
                "skip_special_tokens": pbtxt.truth(options.skip_special_tokens),
            }
        )
        + pbtxt.tensors("input", tensors.POSTPROCESSING_INPUTS)
        + pbtxt.tensors("output", tensors.POSTPROCESSING_OUTPUTS)
    )


def generation(options: TrtllmOptions, *, draft: bool = False) -> str:
    """The language model itself, or the small one that guesses for it."""
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
        "exclude_input_in_output": pbtxt.truth(options.exclude_input_in_output),
        "enable_chunked_context": pbtxt.truth(options.enable_chunked_context),
        **{name: str(value) for name, value in limits.items() if value is not None},
        **options.parameters,
    }
    return (
        _head(DRAFT if draft else GENERATION, 'backend: "tensorrtllm"', options)
        + pbtxt.decoupled(options.decoupled and not draft)
        + pbtxt.instances(1)
        + pbtxt.parameters(values)
        + pbtxt.tensors("input", signature.INPUTS, batches=options.max_batch_size > 0)
        + pbtxt.tensors("output", signature.OUTPUTS)
    )


def ensemble(options: TrtllmOptions) -> str:
    """The three as one, without code."""
    return (
        _head(ENSEMBLE, 'platform: "ensemble"', options)
        + pbtxt.decoupled(options.decoupled)
        + pbtxt.tensors("input", [given.field for given in tensors.TEXT_INPUTS])
        + pbtxt.tensors("output", tensors.TEXT_OUTPUTS)
        + pbtxt.steps((_preprocessing_step(), _generation_step(), _postprocessing_step()))
    )


def bls(options: TrtllmOptions) -> str:
    """The three as one, by a Python model."""
    return (
        _head(BLS, 'backend: "python"', options)
        + pbtxt.decoupled(options.decoupled)
        + pbtxt.instances(1)
        + pbtxt.parameters(
            {
                "accumulate_tokens": pbtxt.truth(options.accumulate_tokens),
                "tensorrt_llm_model_name": GENERATION,
                "tensorrt_llm_draft_model_name": DRAFT if options.draft_model else "",
                "preprocessing_model_name": PREPROCESSING,
                "postprocessing_model_name": POSTPROCESSING,
            }
        )
        + pbtxt.tensors("input", [*(given.field for given in tensors.TEXT_INPUTS), *tensors.DRAFT_INPUTS])
        + pbtxt.tensors("output", tensors.TEXT_OUTPUTS)
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
"""Inputs of tensorrt_llm, and the outputs of preprocessing that they are."""
_TO_POSTPROCESSING = {
    "TOKENS_BATCH": ("output_ids", "_TOKENS_BATCH"),
    "SEQUENCE_LENGTH": ("sequence_length", "_SEQUENCE_LENGTH"),
    "PRECEDING_IDS": ("preceding_ids", "_PRECEDING_IDS"),
}
"""Inputs of postprocessing: the outputs of tensorrt_llm that they are, and the ensemble's names of those."""


def _preprocessing_step() -> pbtxt.EnsembleStep:
    given = {text.preprocessing: text.field.name for text in tensors.TEXT_INPUTS if text.preprocessing}
    return pbtxt.EnsembleStep(
        PREPROCESSING, given, {name: f"_{name}" for name in _FROM_PREPROCESSING.values()}
    )


def _generation_step() -> pbtxt.EnsembleStep:
    given = {name: f"_{output}" for name, output in _FROM_PREPROCESSING.items()}
    given |= {text.generation: text.field.name for text in tensors.TEXT_INPUTS if text.generation}
    made = dict(_TO_POSTPROCESSING.values()) | {field.name: field.name for field in tensors.PASSED_OUTPUTS}
    return pbtxt.EnsembleStep(GENERATION, given, made)


def _postprocessing_step() -> pbtxt.EnsembleStep:
    given = {name: tensor for name, (_, tensor) in _TO_POSTPROCESSING.items()}
    return pbtxt.EnsembleStep(POSTPROCESSING, given, {"OUTPUT": "text_output"})


def _head(name: str, kind: str, options: TrtllmOptions) -> str:
    return f"name: {pbtxt.quoted(name)}\n{kind}\nmax_batch_size: {options.max_batch_size}\n"

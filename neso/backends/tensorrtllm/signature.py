"""Inputs and outputs of TensorRT-LLM's Triton model `tensorrt_llm`.

Some inputs had different names in older versions (`min_length`, `random_seed`, ...). Both names are listed, because
repositories use either.
"""

from __future__ import annotations

from typing import Any

from neso.backends.request_tensors import TensorField, add_inputs, add_outputs


def _scalars(data_type: str, *names: str) -> tuple[TensorField, ...]:
    return tuple(TensorField(name, data_type, optional=True, scalar=True) for name in names)


def _ragged(data_type: str, dims: tuple[int, ...], *names: str) -> tuple[TensorField, ...]:
    return tuple(TensorField(name, data_type, dims, optional=True, ragged=True) for name in names)


INPUTS: tuple[TensorField, ...] = (
    TensorField("input_ids", "TYPE_INT32", (-1,), ragged=True),
    TensorField("input_lengths", "TYPE_INT32", scalar=True),
    TensorField("request_output_len", "TYPE_INT32", scalar=True),
    *_scalars("TYPE_INT32", "num_return_sequences", "end_id", "pad_id", "beam_width"),
    *_ragged("TYPE_INT32", (2, -1), "stop_words_list", "bad_words_list"),
    *_ragged("TYPE_FP32", (-1,), "embedding_bias"),
    *_scalars("TYPE_FP32", "temperature", "runtime_top_p", "runtime_top_p_min", "runtime_top_p_decay"),
    *_scalars("TYPE_INT32", "runtime_top_k", "runtime_top_p_reset_ids", "min_tokens", "min_length"),
    *_scalars("TYPE_FP32", "repetition_penalty", "presence_penalty", "frequency_penalty"),
    *_scalars("TYPE_FP32", "len_penalty", "length_penalty", "beam_search_diversity_rate"),
    *_scalars("TYPE_BOOL", "early_stopping"),
    *_scalars("TYPE_UINT64", "seed", "random_seed"),
    *_scalars("TYPE_BOOL", "return_log_probs", "return_context_logits", "return_generation_logits"),
    *_scalars("TYPE_BOOL", "return_perf_metrics", "return_kv_cache_reuse_stats"),
    *_scalars("TYPE_BOOL", "return_num_input_tokens", "return_num_output_tokens"),
    *_scalars("TYPE_BOOL", "exclude_input_in_output", "stop", "streaming"),
    *_ragged("TYPE_INT32", (-1,), "draft_input_ids"),
    *_ragged("TYPE_FP32", (-1, -1), "draft_logits"),
    *_scalars("TYPE_FP32", "draft_acceptance_threshold"),
    *_ragged("TYPE_FP16", (-1, -1), "prompt_embedding_table"),
    *_ragged("TYPE_UINT64", (-1,), "prompt_table_extra_ids"),
    *_scalars("TYPE_INT32", "prompt_vocab_size"),
    *_scalars("TYPE_UINT64", "lora_task_id"),
    *_ragged("TYPE_FP16", (-1, -1), "lora_weights"),
    *_ragged("TYPE_INT32", (-1, 3), "lora_config"),
    *_ragged("TYPE_STRING", (1,), "guided_decoding_guide_type", "guided_decoding_guide"),
    *_ragged("TYPE_STRING", (1,), "logits_post_processor_name"),
    *_ragged("TYPE_INT32", (-1,), "retention_token_range_starts", "retention_token_range_ends"),
    *_ragged("TYPE_INT32", (-1,), "retention_token_range_priorities", "retention_token_range_durations_ms"),
    *_ragged("TYPE_INT32", (1,), "retention_decode_priority", "retention_decode_duration_ms"),
    *_ragged("TYPE_INT32", (1,), "lookahead_window_size", "lookahead_ngram_size"),
    *_ragged("TYPE_INT32", (1,), "lookahead_verification_set_size"),
    *_ragged("TYPE_INT32", (-1,), "decoder_input_ids"),
    *_scalars("TYPE_INT32", "decoder_input_lengths", "encoder_output_lengths"),
    *_ragged("TYPE_FP16", (-1, -1), "encoder_input_features"),
    *_ragged("TYPE_BOOL", (-1, -1), "cross_attention_mask"),
    *_ragged("TYPE_BOOL", (1,), "skip_cross_attn_blocks"),
    TensorField("mrope_rotary_cos_sin", "TYPE_FP32", (-1,), optional=True),
    TensorField("mrope_position_deltas", "TYPE_INT64", optional=True),
    *_ragged("TYPE_UINT8", (-1,), "context_phase_params"),
)

OUTPUTS: tuple[TensorField, ...] = (
    TensorField("output_ids", "TYPE_INT32", (-1, -1)),
    TensorField("sequence_length", "TYPE_INT32", (-1,)),
    TensorField("cum_log_probs", "TYPE_FP32", (-1,)),
    TensorField("output_log_probs", "TYPE_FP32", (-1, -1)),
    TensorField("context_logits", "TYPE_FP32", (-1, -1)),
    TensorField("generation_logits", "TYPE_FP32", (-1, -1, -1)),
    TensorField("batch_index", "TYPE_INT32"),
    TensorField("sequence_index", "TYPE_INT32"),
    TensorField("kv_cache_alloc_new_blocks", "TYPE_INT32"),
    TensorField("kv_cache_reused_blocks", "TYPE_INT32"),
    TensorField("kv_cache_alloc_total_blocks", "TYPE_INT32"),
    TensorField("arrival_time_ns", "TYPE_INT64"),
    TensorField("first_scheduled_time_ns", "TYPE_INT64"),
    TensorField("first_token_time_ns", "TYPE_INT64"),
    TensorField("last_token_time_ns", "TYPE_INT64"),
    TensorField("acceptance_rate", "TYPE_FP32"),
    TensorField("total_accepted_draft_tokens", "TYPE_INT32"),
    TensorField("total_draft_tokens", "TYPE_INT32"),
    TensorField("num_input_tokens", "TYPE_INT32"),
    TensorField("num_output_tokens", "TYPE_INT32"),
    # The tokens before `output_ids`. Not in TensorRT-LLM; sent only if requested by name.
    TensorField("preceding_ids", "TYPE_INT32", (-1,)),
)


def complete(config: Any) -> None:
    """Add all inputs to a `ModelConfig` without inputs, and all outputs to a `ModelConfig` without outputs."""
    if not config.input:
        add_inputs(config, INPUTS)
    if not config.output:
        add_outputs(config, OUTPUTS)

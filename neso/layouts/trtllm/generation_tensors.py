"""The tensors of the model `tensorrt_llm`."""

from __future__ import annotations

from neso.layouts.pbtxt import TensorField
from neso.layouts.trtllm.tensors import PASSED_OUTPUTS


def _scalars(data_type: str, *names: str) -> tuple[TensorField, ...]:
    return tuple(TensorField(name, data_type, optional=True, scalar=True) for name in names)


def _ragged(name: str, data_type: str, *dims: int) -> TensorField:
    return TensorField(name, data_type, dims, optional=True, ragged=True)


INPUTS = (
    TensorField("input_ids", "INT32", (-1,), ragged=True),
    TensorField("input_lengths", "INT32", scalar=True),
    TensorField("request_output_len", "INT32"),
    *_scalars("INT32", "num_return_sequences", "end_id", "pad_id", "beam_width", "runtime_top_k"),
    *_scalars("INT32", "runtime_top_p_reset_ids", "min_length", "min_tokens", "prompt_vocab_size"),
    *_scalars("FP32", "temperature", "runtime_top_p", "runtime_top_p_min", "runtime_top_p_decay"),
    *_scalars("FP32", "len_penalty", "repetition_penalty", "presence_penalty", "frequency_penalty"),
    *_scalars("FP32", "beam_search_diversity_rate", "draft_acceptance_threshold"),
    *_scalars("UINT64", "random_seed", "seed", "lora_task_id"),
    *_scalars("BOOL", "early_stopping", "return_log_probs", "return_context_logits"),
    *_scalars("BOOL", "return_generation_logits", "return_perf_metrics", "return_num_input_tokens"),
    *_scalars("BOOL", "return_num_output_tokens", "exclude_input_in_output"),
    TensorField("stop", "BOOL", optional=True),
    TensorField("streaming", "BOOL", optional=True),
    _ragged("stop_words_list", "INT32", 2, -1),
    _ragged("bad_words_list", "INT32", 2, -1),
    _ragged("embedding_bias", "FP32", -1),
    _ragged("draft_input_ids", "INT32", -1),
    _ragged("draft_logits", "FP32", -1, -1),
    _ragged("decoder_input_ids", "INT32", -1),
    *_scalars("INT32", "decoder_input_lengths"),
    _ragged("prompt_embedding_table", "FP16", -1, -1),
    _ragged("prompt_table_extra_ids", "UINT64", -1),
    _ragged("lora_weights", "FP16", -1, -1),
    _ragged("lora_config", "INT32", -1, 3),
    TensorField("guided_decoding_guide_type", "STRING", optional=True),
    TensorField("guided_decoding_guide", "STRING", optional=True),
)
OUTPUTS = (
    TensorField("output_ids", "INT32", (-1, -1)),
    TensorField("sequence_length", "INT32", (-1,)),
    *PASSED_OUTPUTS,
)

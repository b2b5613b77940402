"""TensorRT-LLM's `parameters` in config.pbtxt: parsers, and the option set by each parameter.

Parsers raise `ValueError` with the expected value as message.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass

from neso.server.config.model_config import parse_bool

Parser = Callable[[str], object]
Paths = list[list[int]]


def is_unset(text: str) -> bool:
    """Return whether a parameter is empty or an unfilled placeholder of TensorRT-LLM's template (`${name}`)."""
    return not text or (text.startswith("${") and text.endswith("}"))


def text(value: str) -> str:
    return value


def boolean(value: str) -> bool:
    parsed = parse_bool(value)
    if parsed is None:
        raise ValueError("true or false")
    return parsed


def integer(low: int) -> Parser:
    """Return a parser of integers >= `low`."""

    def read(value: str) -> int:
        try:
            number = int(value)
        except ValueError:
            number = low - 1
        if number < low:
            raise ValueError(f"an integer, at least {low}")
        return number

    return read


def fraction(value: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = -1.0
    if not 0 < number <= 1:
        raise ValueError("a number above 0 and at most 1")
    return number


def one_of(*choices: str) -> Parser:
    """Return a parser of one of `choices`, ignoring case."""
    by_lower = {choice.lower(): choice for choice in choices}

    def read(value: str) -> str:
        if value.lower() not in by_lower:
            raise ValueError(f"one of {', '.join(choices)}")
        return by_lower[value.lower()]

    return read


def integers(value: str) -> list[int]:
    """Parse comma-separated integers."""
    try:
        return [int(part) for part in value.split(",") if part.strip()]
    except ValueError:
        raise ValueError("integers, separated by commas") from None


def device_ids(value: str) -> str:
    """Parse sets of GPU numbers, separated by `;`."""
    sets = [integers(part) for part in value.split(";")]
    if not all(sets) or min(map(min, sets)) < 0:
        raise ValueError("GPU numbers, separated by commas, with a set for each instance: 0,1;2,3")
    return ";".join(",".join(map(str, numbers)) for numbers in sets)


def window_sizes(value: str) -> int | list[int]:
    """Parse one window size for all layers, or a list of sizes."""
    sizes = integers(value)
    if not sizes or min(sizes) < 1:
        raise ValueError("an integer, at least 1, or several for the layers, separated by commas")
    return sizes if len(sizes) > 1 else sizes[0]


def choices(value: str) -> Paths:
    """Parse a tree of draft tokens in TensorRT-LLM's notation: `{0}, {0, 0}, {0, 1}`."""
    try:
        paths = json.loads("[" + value.replace("{", "[").replace("}", "]") + "]")
    except ValueError:
        paths = None
    if not paths or not all(isinstance(path, list) and path for path in paths):
        raise ValueError('paths of ranks, like "{0}, {0, 0}, {1}"')
    if not all(type(rank) is int for path in paths for rank in path):
        raise ValueError('paths of ranks, like "{0}, {0, 0}, {1}"')
    result: Paths = paths
    return result


BATCHING = one_of("inflight_fused_batching", "inflight_batching", "V1")
POLICY = one_of("guaranteed_no_evict", "max_utilization")
DECODING_MODES = ("top_k", "top_p", "top_k_top_p", "beam_search", "medusa", "auto")
GUIDED_DECODING_BACKENDS = one_of("xgrammar", "llguidance")


@dataclass(frozen=True, slots=True)
class Parameter:
    """One entry of `parameters`.

    - effect: description; for a parameter without effect, the reason
    - option: engine option set by the parameter
    - setting: whether the parameter is handled by the backend

    A parameter with neither `option` nor `setting` has no effect, which is logged unless `quiet` (for parameters that
    TensorRT-LLM's template always sets).
    """

    name: str
    parse: Parser
    effect: str
    option: str = ""
    setting: bool = False
    quiet: bool = False


def _setting(name: str, parse: Parser, effect: str) -> Parameter:
    return Parameter(name, parse, effect, setting=True)


PARAMETERS: tuple[Parameter, ...] = (
    _setting("gpt_model_path", text, "the model: an engine directory, a checkpoint or a GGUF file"),
    Parameter("gpt_model_type", BATCHING, "in-flight batching, or `V1`: static batches", "gpt_model_type"),
    Parameter(
        "batch_scheduler_policy", POLICY, "when waiting requests are admitted", "batch_scheduler_policy"
    ),
    _setting("max_beam_width", integer(1), "maximum `beam_width` of a request"),
    Parameter(
        "max_tokens_in_paged_kv_cache",
        integer(1),
        "capacity of the KV cache in tokens",
        "max_tokens_in_paged_kv_cache",
    ),
    Parameter(
        "kv_cache_free_gpu_mem_fraction",
        fraction,
        "fraction of the free memory for the KV cache: of the GPU, else of the machine",
        "kv_cache_free_gpu_mem_fraction",
    ),
    _setting("kv_cache_host_memory_bytes", integer(0), "size of the KV cache's host tier; needs a GPU"),
    Parameter("enable_kv_cache_reuse", boolean, "prefix caching", "enable_prefix_caching"),
    Parameter(
        "max_attention_window_size",
        window_sizes,
        "sliding-window size; a list has one size per layer and is repeated if it is shorter",
        "max_attention_window_size",
    ),
    Parameter("sink_token_length", integer(0), "number of attention sink tokens", "sink_token_length"),
    Parameter("max_num_tokens", integer(1), "maximum number of tokens in a step", "max_num_batched_tokens"),
    _setting(
        "enable_chunked_context", boolean, "false: prompts are only split if they exceed `max_num_tokens`"
    ),
    Parameter(
        "max_queue_size",
        integer(1),
        "maximum number of waiting requests; further ones are rejected",
        "max_queue_size",
    ),
    Parameter(
        "enable_trt_overlap",
        boolean,
        "overlap scheduling: the next step is scheduled while one runs",
        "enable_overlap",
    ),
    _setting(
        "exclude_input_in_output", boolean, "false: `output_ids` start with the prompt, except in streams"
    ),
    _setting("decoding_mode", text, "decoding mode; `redrafter`, `lookahead` and `eagle` are rejected"),
    Parameter("medusa_choices", choices, "Medusa's tree of draft tokens", "medusa_choices"),
    _setting("tokenizer_dir", text, "path of the tokenizer, for guided decoding and text"),
    Parameter(
        "lora_cache_max_adapter_size",
        integer(1),
        "maximum rank of an adapter",
        "lora_cache_max_adapter_size",
    ),
    Parameter(
        "lora_cache_host_memory_bytes",
        integer(1),
        "memory limit of loaded adapters",
        "lora_cache_host_memory_bytes",
    ),
    _setting("lora_prefetch_dir", text, "directory of adapters to load with the model, by task id"),
    _setting("encoder_model_path", text, "rejected: encoder-decoder models are not supported"),
    _setting(
        "normalize_log_probs",
        boolean,
        "true: log probabilities are those among the tokens that could be sampled",
    ),
    _setting(
        "iter_stats_max_iterations",
        integer(0),
        "0: no metrics `nv_trt_llm_*`; otherwise they show the last iteration",
    ),
    Parameter(
        "gpu_device_ids", device_ids, "GPUs of the model; a set for each instance: `0,1;2,3`", "device_ids"
    ),
    _setting(
        "participant_ids",
        integers,
        "ranks of the model: as many as it has, and in leader mode all ranks of the job",
    ),
    _setting("num_nodes", integer(1), "values above 1 are rejected"),
    # Parameters without effect.
    Parameter("lora_cache_optimal_adapter_size", integer(1), "adapters are not paged"),
    Parameter("lora_cache_gpu_memory_fraction", fraction, "`lora_cache_host_memory_bytes` limits the cache"),
    Parameter(
        "guided_decoding_backend", GUIDED_DECODING_BACKENDS, "grammars are always compiled by llguidance"
    ),
    Parameter("xgrammar_tokenizer_info_path", text, "grammars use the tokenizer directly"),
    Parameter("executor_worker_path", text, "there are no MPI workers", quiet=True),
    Parameter("cancellation_check_period_ms", integer(0), "cancellation takes effect immediately"),
    Parameter("recv_poll_period_ms", integer(0), "requests are not polled"),
    Parameter("stats_check_period_ms", integer(0), "statistics are read when they are scraped"),
    Parameter(
        "request_stats_max_iterations",
        integer(0),
        "they are statistics of disaggregated serving, which is not supported",
    ),
    Parameter("cross_kv_cache_fraction", fraction, "encoder-decoder models are not supported"),
    Parameter("eagle_choices", choices, "EAGLE is not supported"),
    Parameter("lookahead_window_size", integer(0), "lookahead decoding is not supported"),
    Parameter("lookahead_ngram_size", integer(0), "lookahead decoding is not supported"),
    Parameter("lookahead_verification_set_size", integer(0), "lookahead decoding is not supported"),
    Parameter("gpu_weights_percent", fraction, "all weights are on the device"),
    Parameter("multi_block_mode", boolean, "the runner selects its kernels"),
    Parameter("enable_context_fmha_fp32_acc", boolean, "the runner selects its kernels"),
    Parameter("cuda_graph_mode", boolean, "CUDA graphs of decode steps are always captured if possible"),
    Parameter("cuda_graph_cache_size", integer(0), "the runner determines the number of graphs"),
    Parameter("speculative_decoding_fast_logits", boolean, "draft logits are passed as tensors"),
    Parameter("kv_cache_onboard_blocks", boolean, "blocks are always loaded back from the host"),
    Parameter("FORCE_CPU_ONLY_INPUT_TENSORS", text, "request tensors are on the host", quiet=True),
)

BY_NAME = {parameter.name: parameter for parameter in PARAMETERS}

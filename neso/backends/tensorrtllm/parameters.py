"""How the texts in a model's `parameters` are read. Each function raises `ValueError` that says what it expects."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass

Read = Callable[[str], object]
Paths = list[list[int]]


def is_unset(text: str) -> bool:
    """Whether a parameter says nothing: it is empty, or a placeholder of the template that nobody has filled."""
    return not text or (text.startswith("${") and text.endswith("}"))


def text(value: str) -> str:
    return value


def boolean(value: str) -> bool:
    if value.lower() in ("true", "1", "yes", "on"):
        return True
    if value.lower() in ("false", "0", "no", "off"):
        return False
    raise ValueError("true or false")


def integer(low: int) -> Read:
    """A whole number, at least `low`."""

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


def one_of(*choices: str) -> Read:
    """One of some words; how they are spelled in the list is what they become."""
    by_lower = {choice.lower(): choice for choice in choices}

    def read(value: str) -> str:
        if value.lower() not in by_lower:
            raise ValueError(f"one of {', '.join(choices)}")
        return by_lower[value.lower()]

    return read


def integers(value: str) -> list[int]:
    """Separated by commas."""
    try:
        return [int(part) for part in value.split(",") if part.strip()]
    except ValueError:
        raise ValueError("integers, separated by commas") from None


def window_sizes(value: str) -> int | list[int]:
    """One number for all layers, or one for each."""
    sizes = integers(value)
    if not sizes or min(sizes) < 1:
        raise ValueError("an integer, at least 1, or several for the layers, separated by commas")
    return sizes if len(sizes) > 1 else sizes[0]


def choices(value: str) -> Paths:
    """A tree of guesses as TensorRT-LLM writes it: `{0}, {0, 0}, {0, 1}`."""
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
GUIDES = one_of("xgrammar", "llguidance")


@dataclass(frozen=True, slots=True)
class Parameter:
    """One entry of `parameters`.

    `option`: the engine's option that it becomes. `setting`: the backend implements it itself. With neither it has no
    effect, and `effect` says why; such a one is named in the log, unless it is `quiet`: the template always sets it.
    """

    name: str
    read: Read
    effect: str
    option: str = ""
    setting: bool = False
    quiet: bool = False


def _setting(name: str, read: Read, effect: str) -> Parameter:
    return Parameter(name, read, effect, setting=True)


PARAMETERS: tuple[Parameter, ...] = (
    _setting("gpt_model_path", text, "the model: an engine directory, a checkpoint or a GGUF file"),
    Parameter("gpt_model_type", BATCHING, "batching in flight, or `V1`: static batches", "gpt_model_type"),
    Parameter("batch_scheduler_policy", POLICY, "when requests begin", "batch_scheduler_policy"),
    _setting("max_beam_width", integer(1), "the widest `beam_width` that a request may ask for"),
    Parameter(
        "max_tokens_in_paged_kv_cache",
        integer(1),
        "tokens that the KV cache holds at most",
        "max_tokens_in_paged_kv_cache",
    ),
    Parameter(
        "kv_cache_free_gpu_mem_fraction",
        fraction,
        "share of the free memory that the KV cache may take, without a GPU of the machine's",
        "kv_cache_free_gpu_mem_fraction",
    ),
    _setting("kv_cache_host_memory_bytes", integer(0), "a second tier of the KV cache; needs a GPU"),
    Parameter("enable_kv_cache_reuse", boolean, "prefixes are kept for reuse", "enable_prefix_caching"),
    Parameter(
        "max_attention_window_size",
        window_sizes,
        "tokens that a layer sees; a list is for the layers, and begins again where it ends",
        "max_attention_window_size",
    ),
    Parameter("sink_token_length", integer(0), "first tokens that stay in sight", "sink_token_length"),
    Parameter("max_num_tokens", integer(1), "tokens in a step", "max_num_batched_tokens"),
    _setting(
        "enable_chunked_context", boolean, "false: a prompt is split only where `max_num_tokens` needs it"
    ),
    Parameter("max_queue_size", integer(1), "requests that may wait; more are refused", "max_queue_size"),
    Parameter("enable_trt_overlap", boolean, "the next step is scheduled while one runs", "enable_overlap"),
    _setting(
        "exclude_input_in_output", boolean, "false: `output_ids` begin with the prompt, but for streams"
    ),
    _setting("decoding_mode", text, "how tokens are drawn; `redrafter`, `lookahead` and `eagle` are refused"),
    Parameter("medusa_choices", choices, "Medusa's tree of guesses", "medusa_choices"),
    _setting("tokenizer_dir", text, "where the tokenizer is, for guided decoding and texts"),
    Parameter(
        "lora_cache_max_adapter_size",
        integer(1),
        "the largest rank of an adapter",
        "lora_cache_max_adapter_size",
    ),
    Parameter(
        "lora_cache_host_memory_bytes",
        integer(1),
        "memory of the adapters that are loaded",
        "lora_cache_host_memory_bytes",
    ),
    _setting("lora_prefetch_dir", text, "adapters that are loaded at the start, by task id"),
    _setting("encoder_model_path", text, "refused: models with an encoder are not run"),
    _setting("num_nodes", integer(1), "more than 1 is refused"),
    # From here on: without effect.
    Parameter("lora_cache_optimal_adapter_size", integer(1), "there are no pages for it to size"),
    Parameter("lora_cache_gpu_memory_fraction", fraction, "`lora_cache_host_memory_bytes` limits the cache"),
    Parameter(
        "normalize_log_probs", boolean, "log probabilities are those of the whole distribution in any case"
    ),
    Parameter("guided_decoding_backend", GUIDES, "grammars are compiled by llguidance"),
    Parameter("xgrammar_tokenizer_info_path", text, "grammars read the tokenizer itself"),
    Parameter("gpu_device_ids", integers, "a model runs on the first GPU that CUDA_VISIBLE_DEVICES shows"),
    Parameter("participant_ids", integers, "there are no ranks: one process runs a model"),
    Parameter("executor_worker_path", text, "there are no workers of MPI", quiet=True),
    Parameter("cancellation_check_period_ms", integer(0), "cancelling acts at once"),
    Parameter("recv_poll_period_ms", integer(0), "requests are not polled for"),
    Parameter("stats_check_period_ms", integer(0), "statistics are read when they are scraped"),
    Parameter("iter_stats_max_iterations", integer(0), "statistics are counters, no records of steps"),
    Parameter("request_stats_max_iterations", integer(0), "statistics are counters, no records of steps"),
    Parameter("cross_kv_cache_fraction", fraction, "models with an encoder are not run"),
    Parameter("eagle_choices", choices, "there is no EAGLE"),
    Parameter("lookahead_window_size", integer(0), "there is no lookahead decoding"),
    Parameter("lookahead_ngram_size", integer(0), "there is no lookahead decoding"),
    Parameter("lookahead_verification_set_size", integer(0), "there is no lookahead decoding"),
    Parameter("gpu_weights_percent", fraction, "weights are all on the device"),
    Parameter("multi_block_mode", boolean, "the runner chooses its kernels"),
    Parameter("enable_context_fmha_fp32_acc", boolean, "the runner chooses its kernels"),
    Parameter("cuda_graph_mode", boolean, "graphs of decode steps are captured wherever they can be"),
    Parameter("cuda_graph_cache_size", integer(0), "the runner says how many graphs it keeps"),
    Parameter("speculative_decoding_fast_logits", boolean, "draft logits come as tensors"),
    Parameter("kv_cache_onboard_blocks", boolean, "blocks always come back from the host"),
    Parameter("FORCE_CPU_ONLY_INPUT_TENSORS", text, "tensors of requests are on the host", quiet=True),
)

BY_NAME = {parameter.name: parameter for parameter in PARAMETERS}

"""Conversion of GGUF metadata to an equivalent config.json."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from neso.engine.weights.gguf.file import GGUFFile
from neso.engine.weights.gguf.metadata import Metadata
from neso.engine.weights.source import CheckpointError

# Llama 3.1 first. Models with this scaling differ in the original length, not in the ramp.
_ORIGINAL_LENGTHS = (8192, *(1 << bits for bits in range(10, 18) if bits != 13))
_LOW_FREQ, _HIGH_FREQ = 1.0, 4.0
_TOLERANCE = 1e-4


def llama3_scaling(factors: npt.NDArray[np.float32], theta: float) -> dict[str, Any] | None:
    """Return the `rope_scaling` that divides frequencies by `factors`, float32[head_dim / 2].

    GGUF stores these factors instead of the parameters. Returns None if no known parameters produce them.
    """
    largest = float(factors.max())
    if not largest > 1.0:
        return None
    for length in _ORIGINAL_LENGTHS:
        if np.allclose(
            _llama3_factors(len(factors), theta, largest, length), factors, rtol=_TOLERANCE, atol=0
        ):
            return {
                "rope_type": "llama3",
                "factor": largest,
                "low_freq_factor": _LOW_FREQ,
                "high_freq_factor": _HIGH_FREQ,
                "original_max_position_embeddings": length,
            }
    return None


def _llama3_factors(count: int, theta: float, factor: float, length: int) -> npt.NDArray[np.float64]:
    """Return the divisor of each frequency.

    1 for more than `_HIGH_FREQ` turns in `length` tokens, `factor` for fewer than `_LOW_FREQ`, a ramp between.
    """
    frequencies = theta ** (-np.arange(count) / count)
    turns = length * frequencies / (2 * math.pi)
    kept = np.clip((turns - _LOW_FREQ) / (_HIGH_FREQ - _LOW_FREQ), 0.0, 1.0)
    factors: npt.NDArray[np.float64] = 1 / ((1 - kept) / factor + kept)
    return factors


# Architectures by llama.cpp's name. Mistral models are "llama" too; they differ only in their window.
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen2moe": "Qwen2MoeForCausalLM",
    "qwen3moe": "Qwen3MoeForCausalLM",
}

ROPE_FACTORS = "rope_freqs.weight"

# Unsupported keys, with the value that has no effect.
_NEUTRAL: dict[str, float] = {
    "expert_group_count": 1,
    "attention.scale": 0,
    "attention.max_alibi_bias": 0,
    "attention.clamp_kqv": 0,
    "rope.scaling.attn_factor": 1,
    "rope.scaling.yarn_attn_factor": 1,
    "rope.scaling.yarn_ext_factor": 1,
    "rope.scaling.yarn_log_multiplier": 0,
}


def architecture(file: GGUFFile) -> str:
    """Return llama.cpp's architecture name. Raises `CheckpointError` for an unsupported one."""
    metadata = file.metadata
    kind = metadata.string("general.type", "model")
    if kind != "model":
        raise CheckpointError(f"{file.path}: contains no model: 'general.type' is {kind!r}")
    parts = metadata.integer("split.count", 1)
    if parts > 1:
        raise CheckpointError(
            f"{file.path}: is one of {parts} parts of a model; join them with `llama-gguf-split --merge`"
        )
    name = metadata.string("general.architecture")
    if name not in ARCHITECTURES:
        raise CheckpointError(
            f"{file.path}: architecture {name!r} is not supported in GGUF files; "
            f"supported are {', '.join(ARCHITECTURES)}"
        )
    return name


def model_config(file: GGUFFile) -> dict[str, Any]:
    """Return the fields of config.json. Raises `CheckpointError` for a missing, invalid or unsupported metadata key."""
    arch, metadata = architecture(file), file.metadata
    for key, neutral in _NEUTRAL.items():
        if metadata.number(f"{arch}.{key}", neutral) != neutral:
            raise metadata.error(f"{arch}.{key}", "is not supported")
    num_heads = metadata.positive(f"{arch}.attention.head_count")
    hidden_size = metadata.positive(f"{arch}.embedding_length")
    context_length = metadata.positive(f"{arch}.context_length")
    config: dict[str, Any] = {
        "architectures": [ARCHITECTURES[arch]],
        "model_type": arch,
        "vocab_size": _vocab_size(file),
        "hidden_size": hidden_size,
        "intermediate_size": metadata.positive(f"{arch}.feed_forward_length"),
        "num_hidden_layers": metadata.positive(f"{arch}.block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": metadata.positive(f"{arch}.attention.head_count_kv", num_heads),
        "head_dim": _head_dim(metadata, arch, hidden_size, num_heads),
        "hidden_act": "silu",
        "max_position_embeddings": context_length,
        "rms_norm_eps": metadata.number(f"{arch}.attention.layer_norm_rms_epsilon"),
        "rope_theta": metadata.number(f"{arch}.rope.freq_base", 10_000.0),
        "tie_word_embeddings": "output.weight" not in file,
        "attention_bias": "blk.0.attn_q.bias" in file,
        "mlp_bias": "blk.0.ffn_gate.bias" in file,
    }
    if scaling := _rope_scaling(file, arch, config):
        config["rope_scaling"] = scaling
    config |= _token_ids(metadata, config["vocab_size"]) | _window(metadata, arch, context_length)
    return config | _experts(metadata, arch)


def _experts(metadata: Metadata, arch: str) -> dict[str, Any]:
    """Return the fields of mixture-of-experts models. A "llama" with experts is a Mixtral.

    `norm_topk_prob` is not in the file.
    """
    count = metadata.integer(f"{arch}.expert_count", 0)
    if not count:
        if arch in ("qwen2moe", "qwen3moe"):
            raise metadata.error(f"{arch}.expert_count", "is missing or 0")
        return {}
    if arch not in ("llama", "qwen2moe", "qwen3moe"):
        raise metadata.error(f"{arch}.expert_count", f"({count}) is not supported with this architecture")
    used = metadata.positive(f"{arch}.expert_used_count")
    if arch == "llama":
        fields = {
            "architectures": ["MixtralForCausalLM"],
            "model_type": "mixtral",
            "num_local_experts": count,
        }
        return {**fields, "num_experts_per_tok": used}
    width = metadata.positive(f"{arch}.expert_feed_forward_length")
    return {
        "num_experts": count,
        "num_experts_per_tok": used,
        "moe_intermediate_size": width,
        "shared_expert_intermediate_size": metadata.positive(
            f"{arch}.expert_shared_feed_forward_length", width
        ),
        "norm_topk_prob": arch == "qwen3moe",
    }


def _vocab_size(file: GGUFFile) -> int:
    """Return the number of rows of the embedding: the tokens and possibly padding."""
    rows = file.entry("token_embd.weight").shape[0]
    tokens = len(file.metadata.strings("tokenizer.ggml.tokens", []))
    if tokens > rows:
        raise CheckpointError(
            f"{file.path}: 'tokenizer.ggml.tokens' has {tokens} tokens, but 'token_embd.weight' {rows} rows"
        )
    return rows


def _token_ids(metadata: Metadata, vocab_size: int) -> dict[str, int]:
    """Return the ids of BOS, EOS and padding. Ids outside the vocabulary are treated as absent."""
    keys = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
    ids = {field: metadata.integer(f"tokenizer.ggml.{name}_token_id", -1) for field, name in keys.items()}
    return {field: token_id for field, token_id in ids.items() if 0 <= token_id < vocab_size}


def _head_dim(metadata: Metadata, arch: str, hidden_size: int, num_heads: int) -> int:
    head_dim = metadata.positive(f"{arch}.attention.key_length", max(1, hidden_size // num_heads))
    for key in ("attention.value_length", "rope.dimension_count"):
        if metadata.integer(f"{arch}.{key}", head_dim) != head_dim:
            raise metadata.error(f"{arch}.{key}", f"is not the width of the keys, {head_dim}; not supported")
    return head_dim


def _rope_scaling(file: GGUFFile, arch: str, config: dict[str, Any]) -> dict[str, Any] | None:
    metadata, prefix = file.metadata, f"{arch}.rope.scaling."
    kind = metadata.string(prefix + "type", "linear")
    # Factors 0 and 1 mean no scaling; `scale_linear` is an older key.
    factor = metadata.number(prefix + "factor", metadata.number(f"{arch}.rope.scale_linear", 0.0))
    if kind == "none" or (kind == "linear" and factor in (0.0, 1.0)):
        return _from_factors(file, config) if ROPE_FACTORS in file else None
    if kind not in ("linear", "yarn"):
        raise metadata.error(prefix + "type", f"is {kind!r}; supported are none, linear, yarn")
    if factor <= 0.0:
        raise metadata.error(prefix + "factor", f"must be positive, not {factor}")
    if ROPE_FACTORS in file:
        raise metadata.error(
            prefix + "type", f"is {kind!r} and there is a tensor {ROPE_FACTORS!r}, which is not supported"
        )
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    length = metadata.positive(prefix + "original_context_length", config["max_position_embeddings"])
    return {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": length,
        "beta_fast": metadata.number(prefix + "yarn_beta_fast", 32.0),
        "beta_slow": metadata.number(prefix + "yarn_beta_slow", 1.0),
    }


def _from_factors(file: GGUFFile, config: dict[str, Any]) -> dict[str, Any] | None:
    """Return the scaling for the tensor of frequency divisors that converters write for Llama 3."""
    entry = file.entry(ROPE_FACTORS)
    if entry.type.name != "F32" or entry.shape != (config["head_dim"] // 2,):
        raise CheckpointError(
            f"{file.path}: tensor {ROPE_FACTORS!r} is {entry.type.name} {list(entry.shape)}, "
            f"but must be F32 [{config['head_dim'] // 2}]"
        )
    factors = file.tensor(ROPE_FACTORS)
    if (factors == np.float32(1)).all():
        return None
    scaling = llama3_scaling(factors, config["rope_theta"])
    if scaling is None:
        raise CheckpointError(
            f"{file.path}: tensor {ROPE_FACTORS!r} holds factors of no known scaling of Llama 3; not supported"
        )
    return scaling


def _window(metadata: Metadata, arch: str, context_length: int) -> dict[str, Any]:
    """Return the fields of sliding-window models. A "llama" with a window is a Mistral."""
    key = f"{arch}.attention.sliding_window"
    window = metadata.integer(key, 0)
    if not 0 < window < context_length:
        return {}
    if arch != "llama":
        raise metadata.error(key, f"({window}) is supported for the architecture llama only")
    return {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": window}

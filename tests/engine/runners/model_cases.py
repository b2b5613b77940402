"""Tiny models of every family: architecture and config.json fields by name."""

from __future__ import annotations

from typing import Any

HALF = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
TWO_BASES = {
    "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 100_000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
}
WINDOWED = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "sliding_window": 9}
MULTIPLIERS = {
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.4,
    "logits_scaling": 2.0,
}

DENSE: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma": ("gemma", {}),
    "gemma2": ("gemma2", {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 4.0}),
    "gemma2 untied, no caps": (
        "gemma2",
        {"tie_word_embeddings": False, "attn_logit_softcapping": None, "final_logit_softcapping": None},
    ),
    "gemma3": ("gemma3_text", {}),
    "gemma3 two bases, cap": ("gemma3_text", {"rope_parameters": TWO_BASES, "final_logit_softcapping": 5.0}),
    "phi3": ("phi3", {"sliding_window": 11}),
    "phi4 partial rotary, tied": ("phi3", {"rope_parameters": HALF, "tie_word_embeddings": True}),
    "gpt2": ("gpt2", {}),
    "gpt2 untied": ("gpt2", {"tie_word_embeddings": False, "activation_function": "gelu", "n_inner": 72}),
    "gpt_bigcode": ("gpt_bigcode", {}),
    "gpt_bigcode multi-head": ("gpt_bigcode", {"multi_query": False, "n_inner": 72}),
    "gpt_neox": ("gpt_neox", {}),
    "gpt_neox sequential, no bias": (
        "gpt_neox",
        {"use_parallel_residual": False, "attention_bias": False, "rope_parameters": HALF},
    ),
    "opt": ("opt", {}),
    "opt no biases": ("opt", {"enable_bias": False, "tie_word_embeddings": False}),
    "opt post-norm, projections": ("opt", {"do_layer_norm_before": False, "word_embed_proj_dim": 32}),
    "opt projections, untied": ("opt", {"word_embed_proj_dim": 56, "tie_word_embeddings": False}),
    "phi": ("phi", {}),
    "granite": ("granite", MULTIPLIERS),
    "olmo2": ("olmo2", {}),
    "olmo3": ("olmo3", {}),
    "olmo3 scaled": ("olmo3", {"rope_parameters": TWO_BASES}),
    "smollm3": ("smollm3", {"no_rope_layers": [1, 0, 1]}),
    "smollm3 windows": (
        "smollm3",
        {"no_rope_layer_interval": 2, "use_sliding_window": True, "sliding_window": 9},
    ),
    "starcoder2": ("starcoder2", {"sliding_window": 9}),
    "starcoder2 no biases": ("starcoder2", {"use_bias": False}),
    "stablelm": ("stablelm", {"use_qkv_bias": True}),
    "stablelm parallel": ("stablelm", {"use_parallel_residual": True}),
    "cohere": ("cohere", {"attention_bias": True}),
    "cohere2": ("cohere2", {}),
}
SPARSE: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("mixtral", {}),
    "mixtral window": ("mixtral", {"sliding_window": 9, "num_local_experts": 8, "num_experts_per_tok": 3}),
    "qwen2_moe": ("qwen2_moe", {}),
    "qwen2_moe dense layers": ("qwen2_moe", {"decoder_sparse_step": 2, "norm_topk_prob": True}),
    "qwen3_moe": ("qwen3_moe", {}),
    "qwen3_moe dense layer": ("qwen3_moe", {"mlp_only_layers": [0], "norm_topk_prob": True}),
    "olmoe": ("olmoe", {}),
}
MODELS = DENSE | SPARSE

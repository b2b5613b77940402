"""Write a trained model as a Hugging Face checkpoint in bfloat16."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import LlamaForCausalLM


def export(model: LlamaForCausalLM, directory: Path) -> None:
    """Write config.json, generation_config.json and model.safetensors. Tied output weights are written once."""
    config = model.config
    fields = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": config.eos_token_id,
        "pad_token_id": config.pad_token_id,
        "torch_dtype": "bfloat16",
    }
    _write_json(directory / "config.json", fields)
    ends = {name: fields[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    _write_json(directory / "generation_config.json", ends)
    weights = {
        name: tensor.detach().to(torch.bfloat16).contiguous()
        for name, tensor in model.state_dict().items()
        if name != "lm_head.weight"
    }
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})


def _write_json(path: Path, fields: dict[str, object]) -> None:
    path.write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")

"""Random adapters written by peft, and reference outputs of peft."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from checkpoints import load_oracle
from oracle import greedy_of
from peft import LoraConfig, PeftModel, get_peft_model

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def write_adapter(base: Path, directory: Path, *, seed: int, dtype: str = "float32", **options: Any) -> Path:
    """Write an adapter with random A and B for the checkpoint `base`; `options` are fields of peft's `LoraConfig`."""
    torch.manual_seed(seed)
    fields = {"r": 4, "lora_alpha": 8, "target_modules": ALL, "init_lora_weights": False, **options}
    model = get_peft_model(load_oracle(base), LoraConfig(task_type="CAUSAL_LM", **fields))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                # Large enough that a missing or wrong adapter changes the tokens.
                parameter.copy_(torch.randn_like(parameter) * 0.15)
                parameter.data = parameter.data.to(getattr(torch, dtype))
    model.save_pretrained(directory)
    return directory


def greedy_with(
    base: Path, adapter: Path | None, prompts: list[list[int]], max_tokens: int, *, merged: bool = False
) -> list[list[int]]:
    """Return output token ids of each prompt, float32, by peft with this adapter; end tokens do not stop generation."""
    model: Any = load_oracle(base)
    if adapter is not None:
        model = PeftModel.from_pretrained(model, adapter).eval()
        if merged:
            model = model.merge_and_unload()
    return greedy_of(model, prompts, max_tokens)

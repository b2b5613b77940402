"""Reference greedy generation with transformers, one prompt at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from checkpoints import load_oracle


def greedy(directory: Path, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
    """Return output token ids of each prompt, float32; end tokens do not stop generation."""
    return greedy_of(load_oracle(directory), prompts, max_tokens)


def greedy_of(model: Any, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
    """Return the same for a loaded model."""
    results = []
    for prompt in prompts:
        with torch.no_grad():
            output = model.generate(
                input_ids=torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                max_new_tokens=max_tokens,
                do_sample=False,
                eos_token_id=-1,
                pad_token_id=2,
            )
        results.append(output[0, len(prompt) :].tolist())
    return results

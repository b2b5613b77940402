"""Reference beam search with transformers, one prompt at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from checkpoints import PAD, load_oracle

Beams = list[tuple[list[int], float]]


def beam_search(
    directory: Path, prompts: list[list[int]], end: int | list[int], **options: Any
) -> list[Beams]:
    """Return output tokens and scores of each prompt's best sequences. `end`: tokens that end one, -1 for none.

    A score is the sum of the log probabilities, divided by the length to the power of `length_penalty`.
    """
    model = load_oracle(directory)
    results = []
    for prompt in prompts:
        with torch.no_grad():
            output = model.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                do_sample=False,
                eos_token_id=end,
                pad_token_id=PAD,
                return_dict_in_generate=True,
                output_scores=True,
                **options,
            )
        results.append(
            [
                (_until_end(row[len(prompt) :].tolist(), end), score)
                for row, score in zip(output.sequences, output.sequences_scores.tolist(), strict=True)
            ]
        )
    return results


def _until_end(tokens: list[int], end: int | list[int]) -> list[int]:
    """Return the tokens up to the first end token, without padding."""
    ends = [end] if isinstance(end, int) else end
    first = next((i + 1 for i, token in enumerate(tokens) if token in ends), len(tokens))
    return tokens[:first]

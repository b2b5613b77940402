"""What a model is asked to go on from."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from neso.frontends.openai.errors import invalid
from neso.generation import TokenizerLike, encode_text

MAX_PROMPTS = 2048
"""As with OpenAI. Each prompt is a request to the engine, so one body must not bring any number of them."""

Vectors = npt.NDArray[Any]
Prompt = str | list[int] | Vectors
"""Text, token ids, or vectors float[tokens, hidden_size]."""


async def cut_prompt(
    prompt: Prompt, text: TokenizerLike, keep: int | None, max_model_len: int, *, add_special_tokens: bool
) -> Prompt:
    """The prompt, or its last `keep` tokens; of -1, as many as leave room for one more. Raises `ApiError`."""
    if keep is None or isinstance(prompt, np.ndarray):
        return prompt
    if keep == 0 or keep >= max_model_len:
        raise invalid(
            "truncate_prompt_tokens",
            f"'truncate_prompt_tokens' must be -1 or from 1 to {max_model_len - 1}, got {keep}.",
        )
    ids = prompt
    if isinstance(prompt, str):
        ids = await encode_text(text, prompt, add_special_tokens=add_special_tokens)
    return ids[-(max_model_len - 1 if keep < 0 else keep) :]


def prompt_text(prompt: Prompt, text: TokenizerLike) -> str:
    """The prompt as `echo` gives it back."""
    if isinstance(prompt, str):
        return prompt
    return "" if isinstance(prompt, np.ndarray) else text.decode(prompt, skip_special_tokens=False)

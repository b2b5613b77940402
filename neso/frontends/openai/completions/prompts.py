"""The prompts of a completion."""

from __future__ import annotations

import numpy as np

from neso.frontends.openai.completions.prompt_embeds import Vectors, read_vectors
from neso.frontends.openai.errors import invalid
from neso.frontends.openai.requests.schemas import CompletionRequest
from neso.generation import TextTools, encode_text

MAX_PROMPTS = 2048
"""As with OpenAI. Each prompt is a request to the engine, so one body must not bring any number of them."""

Prompt = str | list[int] | Vectors
"""Text, token ids, or vectors float[tokens, hidden_size]."""


def completion_prompts(request: CompletionRequest) -> list[Prompt]:
    """The prompts in the order of their choices: first those that are vectors. Raises `ApiError`."""
    vectors = _vectors(request)
    if request.prompt is None or (vectors and request.prompt in ("", [])):
        if not vectors:
            raise invalid("prompt", "'prompt' is missing.", "missing_required_parameter")
        return vectors
    prompts = [*vectors, *_texts(request.prompt)]
    if len(prompts) > MAX_PROMPTS:
        raise invalid("prompt", f"'prompt' holds {len(prompts)} prompts, at most {MAX_PROMPTS} are allowed.")
    return prompts


def _vectors(request: CompletionRequest) -> list[Prompt]:
    given = request.prompt_embeds
    if not given:
        return []
    for name in ("echo", "prompt_logprobs", "truncate_prompt_tokens"):
        if getattr(request, name):
            raise invalid(name, f"'{name}' is for prompts of tokens, not for 'prompt_embeds'.")
    texts = [given] if isinstance(given, str) else given
    if len(texts) > MAX_PROMPTS:
        raise invalid("prompt_embeds", f"At most {MAX_PROMPTS} prompts are allowed.")
    try:
        return [read_vectors(text) for text in texts]
    except ValueError as error:
        raise invalid("prompt_embeds", f"Invalid 'prompt_embeds': {error}.") from None


def _texts(given: str | list[int] | list[str] | list[list[int]]) -> list[Prompt]:
    prompts: list[Prompt]
    if isinstance(given, str):
        prompts = [given]
    elif given and isinstance(given[0], int):
        prompts = [given]  # one list of token ids
    else:
        prompts = list(given)  # type: ignore[arg-type]  # texts, or lists of token ids
    if not prompts or any(prompt == [] for prompt in prompts):
        raise invalid("prompt", "'prompt' must not be an empty list.")
    return prompts


async def cut_prompt(
    prompt: Prompt, text: TextTools, keep: int | None, max_model_len: int, *, add_special_tokens: bool
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


def prompt_text(prompt: Prompt, text: TextTools) -> str:
    """The prompt as `echo` gives it back."""
    if isinstance(prompt, str):
        return prompt
    return "" if isinstance(prompt, np.ndarray) else text.decode(prompt, skip_special_tokens=False)

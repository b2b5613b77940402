"""The prompts of a completion."""

from __future__ import annotations

from neso.frontends.openai.errors import invalid
from neso.frontends.openai.schemas import CompletionRequest
from neso.frontends.openai.tensor_models.model import NO_LIMIT
from neso.generation import TextTools

MAX_PROMPTS = 2048
"""As with OpenAI. Each prompt is a request to the engine, so one body must not bring any number of them."""

Prompt = str | list[int]


def completion_prompts(request: CompletionRequest) -> list[Prompt]:
    """The prompts in the order of their choices, each as text or as token ids. Raises `ApiError`."""
    given = request.prompt
    prompts: list[Prompt]
    if isinstance(given, str):
        prompts = [given]
    elif given and isinstance(given[0], int):
        prompts = [given]  # one list of token ids
    else:
        prompts = list(given)  # type: ignore[arg-type]  # texts, or lists of token ids
    if not prompts or any(prompt == [] for prompt in prompts):
        raise invalid("prompt", "'prompt' must not be an empty list.")
    if len(prompts) > MAX_PROMPTS:
        raise invalid("prompt", f"'prompt' holds {len(prompts)} prompts, at most {MAX_PROMPTS} are allowed.")
    return prompts


def prompt_text(prompt: Prompt, text: TextTools) -> str:
    """The prompt as `echo` gives it back."""
    return prompt if isinstance(prompt, str) else text.decode(prompt, skip_special_tokens=False)


def is_too_long(prompt: Prompt, text: TextTools, max_model_len: int, add_special_tokens: bool) -> bool:
    """Whether the prompt leaves no room for an answer. Tokenizes: for the error path only."""
    if max_model_len >= NO_LIMIT:
        return False
    if isinstance(prompt, str):
        prompt = text.encode(prompt, add_special_tokens=add_special_tokens)
    return len(prompt) >= max_model_len

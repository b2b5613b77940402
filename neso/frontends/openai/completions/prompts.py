"""The prompts of a completion."""

from __future__ import annotations

from neso.frontends.openai.completions.prompt_embeds import read_vectors
from neso.frontends.openai.errors import invalid
from neso.frontends.openai.requests.prompts import MAX_PROMPTS, Prompt
from neso.frontends.openai.requests.schemas import CompletionRequest


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

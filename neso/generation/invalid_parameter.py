"""The errors about a request's parameters."""

from __future__ import annotations


class InvalidParameter(ValueError):
    """A request parameter that cannot be honoured. `field` names it, as the client wrote it."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
        self.message = message


class PromptTooLong(InvalidParameter):
    """A prompt that leaves no room for an answer in the model's context."""

    def __init__(self, num_tokens: int, max_model_len: int) -> None:
        super().__init__(
            "prompt",
            f"is {num_tokens} tokens long; this model's context is {max_model_len} tokens, of which at least one must "
            "be left for the output",
        )
        self.num_tokens = num_tokens
        self.max_model_len = max_model_len


def check_prompt_length(num_tokens: int, max_model_len: int) -> None:
    """Raises `InvalidParameter` for a prompt without tokens, and for one that is too long."""
    if not num_tokens:
        raise InvalidParameter("prompt", "is empty")
    if num_tokens >= max_model_len:
        raise PromptTooLong(num_tokens, max_model_len)

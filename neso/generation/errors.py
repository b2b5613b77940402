"""Request parameter errors, and checks shared by several modules."""

from __future__ import annotations


class InvalidParameter(ValueError):
    """A request parameter is not valid or not supported. `field` is its name in the client's request."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
        self.message = message


class PromptTooLong(InvalidParameter):
    """The prompt leaves no room for output in the model's context."""

    def __init__(self, num_tokens: int, max_model_len: int, *, exact: bool = True) -> None:
        """`exact`: False if `num_tokens` is a lower bound, because only a part of the prompt was tokenized."""
        self.length = f"{num_tokens}" if exact else f"at least {num_tokens}"
        super().__init__(
            "prompt",
            f"is {self.length} tokens long; this model's context is {max_model_len} tokens, of which at least one must "
            "be left for the output",
        )
        self.num_tokens = num_tokens
        self.max_model_len = max_model_len


def check_prompt_length(num_tokens: int, max_model_len: int) -> None:
    """Raise `InvalidParameter` for an empty prompt, `PromptTooLong` for a prompt that fills the context."""
    if not num_tokens:
        raise InvalidParameter("prompt", "is empty")
    if num_tokens >= max_model_len:
        raise PromptTooLong(num_tokens, max_model_len)


def check_unicode(field: str, text: str) -> None:
    """Raise `InvalidParameter` for text with a lone surrogate, which JSON can represent but UTF-8 cannot."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidParameter(field, f"is not valid Unicode text: {error}") from None

"""A chat template that stands in place of the models' own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from neso.engine.text.no_tokenizer import NoTokenizer
from neso.generation import InvalidParameter, TokenizerLike
from neso.generation.language_model import TokenBytes

if TYPE_CHECKING:
    from neso.engine.text.chat_template import ChatTemplate


class TemplatedText:
    """The `TokenizerLike` of a model with another chat template."""

    has_chat_template = True

    def __init__(self, tools: TokenizerLike, source: str) -> None:
        self._tools = tools
        self.chat_template_source = source

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return self._tools.encode(text, add_special_tokens=add_special_tokens)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return self._tools.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes | None:
        """See `TokenBytes`."""
        return self._tools.token_bytes(token_id) if isinstance(self._tools, TokenBytes) else None

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        special_tokens = getattr(self._tools, "special_tokens", None)
        texts = special_tokens.texts if special_tokens else {}
        return _template(self.chat_template_source, tuple(sorted(texts.items()))).render(
            messages, tools=tools, add_generation_prompt=add_generation_prompt, variables=variables
        )


@lru_cache(32)
def _template(source: str, special_tokens: tuple[tuple[str, str], ...]) -> ChatTemplate:
    """The template, which is compiled once for all requests."""
    from neso.engine.text.chat_template import ChatTemplate

    return ChatTemplate(source, dict(special_tokens))


class UnknownText(NoTokenizer):
    """The `TokenizerLike` of a model whose tokenizer nobody knows."""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise InvalidParameter("model", "no tokenizer is known for it, so it takes a prompt of text only")


UNKNOWN_TEXT = UnknownText()


def read_chat_template(given: str) -> str:
    """The template in a file, or the one that is given itself. Raises `ValueError`."""
    if "{{" in given or "{%" in given:
        return given
    try:
        return Path(given).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ValueError(f"the chat template '{given}' cannot be read: {error}") from None

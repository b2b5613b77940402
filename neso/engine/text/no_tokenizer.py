"""What stands in place of a tokenizer where token ids go in and come out and nobody needs their text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from neso.generation import InvalidParameter


class NoTokenizer:
    """Has the face of `Tokenizer`. Tokens have no text; texts are refused with `InvalidParameter("prompt", ...)`."""

    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None
    has_chat_template = False
    chat_template_source = ""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        self._refuse()

    def encode_batch(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[list[int]]:
        """Nothing for nothing."""
        return self._refuse() if texts else []

    def encode_pair(
        self,
        text: str,
        second: str | None = None,
        *,
        add_special_tokens: bool = True,
        max_tokens: int | None = None,
    ) -> tuple[list[int], list[int]]:
        self._refuse()

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return ""

    def detokenizer(
        self,
        *,
        skip_special_tokens: bool = True,
        shown_special_tokens: Sequence[str] = (),
        prompt_token_ids: Sequence[int] = (),
    ) -> NoDetokenizer:
        return _NO_DETOKENIZER

    def token_text(self, token_id: int) -> str:
        return ""

    def token_bytes(self, token_id: int) -> bytes | None:
        return None

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise InvalidParameter("prompt", "this engine has no tokenizer: it takes token ids only")


class NoDetokenizer:
    """Tokens without text."""

    def add(self, token_ids: Sequence[int]) -> str:
        return ""

    def finish(self) -> str:
        return ""


NO_TOKENIZER = NoTokenizer()
_NO_DETOKENIZER = NoDetokenizer()

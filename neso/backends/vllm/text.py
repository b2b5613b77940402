"""Text to tokens and back for a model on vLLM."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from neso.engine.text.errors import TokenizerError
from neso.engine.text.tokenizer import Tokenizer
from neso.engine.weights.hub import ModelNotFound, resolve_model
from neso.engine.weights.source import CheckpointError
from neso.generation import InvalidParameter, TextTools


def text_tools(model: str, revision: str | None, tokenizer: Any) -> TextTools:
    """Neso's tokenizer of a checkpoint, where it has files that that reads; else vLLM's `tokenizer`. Blocks."""
    try:
        return Tokenizer.from_model(resolve_model(model, revision))
    except (TokenizerError, CheckpointError, ModelNotFound):
        return LibraryText(tokenizer)


class LibraryText:
    """`TextTools` over a tokenizer with transformers' interface."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    @property
    def has_chat_template(self) -> bool:
        """Whether `apply_chat_template` can be used."""
        return bool(self.chat_template_source)

    @property
    def chat_template_source(self) -> str:
        """See `TextTools.chat_template_source`."""
        source = getattr(self._tokenizer, "chat_template", None) or ""
        return "\n".join(map(str, source.values())) if isinstance(source, Mapping) else str(source)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """See `TextTools.encode`."""
        return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens))

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """See `TextTools.decode`."""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens))

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """See `TextTools.apply_chat_template`."""
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    list(messages),
                    tools=None if tools is None else list(tools),
                    add_generation_prompt=add_generation_prompt,
                    tokenize=False,
                    **variables,
                )
            )
        except Exception as error:  # templates raise what they like
            raise InvalidParameter("messages", f"the chat template refuses them: {error}") from None

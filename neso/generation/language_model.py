"""Interface of a model that generates text, implemented by engines and used by the OpenAI frontend and backends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from neso.generation.errors import PromptTooLong
from neso.generation.output import GenerationOutput
from neso.generation.request import GenerationRequest, LoraRequest
from neso.generation.sampling_params import SamplingDefaults

UNLIMITED_LENGTH = 2**31 - 1
"""`max_model_len` of a model with unknown context length."""
_THREAD_THRESHOLD = 10_000
"""Length from which a text is tokenized in a thread, in characters."""


class TokenizerLike(Protocol):
    """Tokenizer and chat template of one model."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of `text`."""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of `token_ids`; invalid UTF-8 becomes U+FFFD."""

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """Render the prompt of a chat. Raises `InvalidParameter("messages", …)` if the template rejects the messages.

        `messages` is positional because `variables` are set by the client and can have any name.
        """

    @property
    def has_chat_template(self) -> bool:
        """Whether `apply_chat_template` can be used."""

    @property
    def chat_template_source(self) -> str:
        """Source of the chat template, used to detect the format of tool calls and reasoning; "" without a template."""


@runtime_checkable
class TokenBytes(Protocol):
    """A `TokenizerLike` that also provides the exact bytes of its tokens."""

    def token_bytes(self, token_id: int) -> bytes | None:
        """Return the bytes of one token; None if the tokenizer does not define bytes of single tokens."""


class LanguageModel(Protocol):
    """A model that generates text."""

    @property
    def text(self) -> TokenizerLike: ...

    @property
    def max_model_len(self) -> int:
        """Maximum number of tokens of prompt and output together."""

    @property
    def default_sampling(self) -> SamplingDefaults:
        """Defaults for frontends whose clients omit parameters. `generate` does not apply them."""

    def generate(self, request: GenerationRequest) -> AsyncGenerator[GenerationOutput, None]:
        """Stream the outputs of `request`.

        The first `__anext__` checks the request and raises `InvalidParameter` if the model does not support it, or an
        error of the model's engine. Closing the iterator early (`aclose()`, or cancelling the task that reads
        it) aborts the request: its blocks are free before the next engine step.
        """


@runtime_checkable
class SupportsLora(Protocol):
    """A language model with LoRA adapters."""

    @property
    def allows_runtime_lora(self) -> bool:
        """Whether clients may load and unload adapters."""

    def list_loras(self) -> Mapping[str, str | None]:
        """Return the names of the loaded adapters, with the path of adapters that were loaded from a path."""

    async def load_lora(self, lora: LoraRequest) -> None:
        """Load an adapter. A loaded adapter with the same name serves until it is ready. Raises `ServerError`."""

    async def unload_lora(self, name: str) -> None:
        """Unload an adapter. Requests in flight finish with it. Raises `NotFound` if it is not loaded."""


@runtime_checkable
class SupportsImages(Protocol):
    """A language model that knows whether it accepts images in its prompts."""

    @property
    def accepts_images(self) -> bool: ...


_LONG_TEXT = 8
"""Characters per token above which a text probably exceeds a number of tokens; English has about four."""
_COUNTED_PIECE = 1 << 20
"""Characters that are tokenized at once to count tokens; each takes up to 200 bytes."""
_CUT_MARGIN = 256
"""Margin for the tokens of a part of a text that are not tokens of the whole text: those next to the cut."""


def cut_text(
    tokenizer: TokenizerLike, text: str, num_tokens: int, *, from_end: bool = False
) -> tuple[str, int]:
    """Return a start or an end of `text` that has more than `num_tokens` tokens, and how many these are at least.

    Returns the whole text and 0 if it is short, or if it has no more tokens. The work is proportional to `num_tokens`,
    not to the text: parts of doubling length are tokenized until one has enough tokens.

    A bound by the longest token of the vocabulary would reject texts that fit (WordPiece drops white space and maps any
    long word to one token), and would be weak: with a token of 128 spaces, 4 MB could fit a context of 32,768.
    """
    if len(text) <= _LONG_TEXT * num_tokens + _CUT_MARGIN:
        return text, 0
    size = 2 * num_tokens + 2 * _CUT_MARGIN
    while size < len(text):
        part = text[-size:] if from_end else text[:size]
        at_least = len(tokenizer.encode(part, add_special_tokens=False)) - _CUT_MARGIN
        if at_least > num_tokens:
            return part, at_least
        size *= 2
    return text, 0


def encode_prompt(
    tokenizer: TokenizerLike, text: str, max_model_len: int, *, add_special_tokens: bool = True
) -> list[int]:
    """Return the token ids of a prompt. Raises `PromptTooLong` for a long text without tokenizing all of it."""
    _, at_least = cut_text(tokenizer, text, max_model_len)
    if at_least:
        raise PromptTooLong(at_least, max_model_len, exact=False)
    return tokenizer.encode(text, add_special_tokens=add_special_tokens)


def count_tokens(tokenizer: TokenizerLike, text: str, *, add_special_tokens: bool = True) -> int:
    """Return the number of tokens of a text. Long texts are tokenized in pieces, so the number is approximate."""
    starts = range(0, max(len(text), 1), _COUNTED_PIECE)
    pieces = (text[start : start + _COUNTED_PIECE] for start in starts)
    return sum(
        len(tokenizer.encode(piece, add_special_tokens=add_special_tokens and number == 0))
        for number, piece in enumerate(pieces)
    )


async def encode_text(
    tokenizer: TokenizerLike,
    text: str,
    *,
    add_special_tokens: bool = True,
    max_model_len: int = UNLIMITED_LENGTH,
) -> list[int]:
    """Like `encode_prompt`, but encodes long texts in a thread to keep the event loop responsive."""
    if len(text) < _THREAD_THRESHOLD:
        return tokenizer.encode(text, add_special_tokens=add_special_tokens)
    return await asyncio.to_thread(
        encode_prompt, tokenizer, text, max_model_len, add_special_tokens=add_special_tokens
    )

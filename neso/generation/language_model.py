"""Interface of a model that generates text, implemented by engines and used by the OpenAI frontend and backends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from neso.generation.output import GenerationOutput
from neso.generation.request import GenerationRequest, LoraRequest
from neso.generation.sampling_params import SamplingDefaults

_THREAD_THRESHOLD = 10_000
"""Characters from which a text is tokenized in a thread."""


class TokenizerLike(Protocol):
    """Tokenizer and chat template of one model."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`."""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of `token_ids`; invalid UTF-8 becomes U+FFFD."""

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """The prompt for a chat. Raises `InvalidParameter("messages", …)` if the template rejects them.

        `variables` are the client's and can have any name, therefore `messages` is positional.
        """

    @property
    def has_chat_template(self) -> bool:
        """Whether `apply_chat_template` can be used."""

    @property
    def chat_template_source(self) -> str:
        """Source of the chat template, from which the format of tool calls and reasoning is detected; "" if none."""


@runtime_checkable
class TokenBytes(Protocol):
    """A `TokenizerLike` that knows the exact bytes of its tokens."""

    def token_bytes(self, token_id: int) -> bytes | None:
        """Bytes of one token; None if the tokenizer has no bytes for single tokens."""


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

        The first `__anext__` checks the request and raises `InvalidParameter` if the model does not support it, or
        `EngineDead` if the engine has ended. Closing the iterator early (`aclose()`, or cancelling the task that reads
        it) aborts the request: its blocks are free before the next engine step.
        """


@runtime_checkable
class SupportsLora(Protocol):
    """A language model with LoRA adapters."""

    @property
    def allows_runtime_lora(self) -> bool:
        """Whether clients may load and unload adapters."""

    def list_loras(self) -> Mapping[str, str | None]:
        """Names of the loaded adapters, with the path of those that were loaded from one."""

    async def load_lora(self, lora: LoraRequest) -> None:
        """Load an adapter; one of the same name serves until it is ready. Raises `ServerError`."""

    async def unload_lora(self, name: str) -> None:
        """Unload an adapter; requests in flight finish with it. Raises `NotFound` if there is none."""


async def encode_text(tokenizer: TokenizerLike, text: str, *, add_special_tokens: bool = True) -> list[int]:
    """As `TokenizerLike.encode`, with long texts in a thread so that they do not block the event loop."""
    if len(text) < _THREAD_THRESHOLD:
        return tokenizer.encode(text, add_special_tokens=add_special_tokens)
    return await asyncio.to_thread(tokenizer.encode, text, add_special_tokens=add_special_tokens)

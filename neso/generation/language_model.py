"""The face of a language model that front ends see beside its tensors."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from neso.generation.lora import LoraRequest
from neso.generation.output import GenerationOutput
from neso.generation.request import GenerationRequest
from neso.generation.sampling_defaults import SamplingDefaults


class TextTools(Protocol):
    """Text to tokens and back, for one model."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`."""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of `token_ids`; bytes that are no UTF-8 become U+FFFD."""

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """The prompt for a chat. Raises `InvalidParameter("messages", …)` if the template refuses them.

        `variables` are the client's, of any name: those before them go by their places.
        """

    @property
    def has_chat_template(self) -> bool:
        """Whether `apply_chat_template` can be used."""

    @property
    def chat_template_source(self) -> str:
        """The text of the chat template, by which is known how the model writes calls and reasoning; "" for none."""


@runtime_checkable
class TokenBytes(Protocol):
    """`TextTools` that know their tokens to the byte."""

    def token_bytes(self, token_id: int) -> bytes | None:
        """Bytes of one token; None if the tokenizer has none for single tokens."""


class LanguageModel(Protocol):
    """A model that generates text. Engines implement it; OpenAI's front end and the `llm` backend use it."""

    @property
    def text(self) -> TextTools: ...

    @property
    def max_model_len(self) -> int:
        """Most tokens of prompt and output together."""

    @property
    def default_sampling(self) -> SamplingDefaults:
        """For front ends whose clients leave things out: `generate` takes a request's parameters as they are."""

    def generate(self, request: GenerationRequest) -> AsyncGenerator[GenerationOutput, None]:
        """Stream the outputs of `request`.

        The request is checked at the first `__anext__`, which raises `InvalidParameter` when it cannot be served
        (prompt too long, a parameter that the runner cannot honour) and `EngineDead` when the engine is gone.
        Closing the iterator early (`aclose()`, or cancelling the task that reads it) aborts the request: its
        blocks are free before the next engine step.
        """


@runtime_checkable
class AdaptableModel(Protocol):
    """A language model that has adapters."""

    @property
    def allows_runtime_lora(self) -> bool:
        """Whether clients may load and unload adapters."""

    def list_loras(self) -> Mapping[str, str | None]:
        """The adapters that requests can name, with the paths of those that were loaded from one."""

    async def load_lora(self, lora: LoraRequest) -> None:
        """Load an adapter; one that has its name serves on until this one is there. Raises `ServerError`."""

    async def unload_lora(self, name: str) -> None:
        """Forget an adapter; requests in flight end with it. Raises `NotFound` if there is none."""

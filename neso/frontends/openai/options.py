"""Options of the OpenAI frontend and of its access control."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from neso.frontends.security import Restrictions

if TYPE_CHECKING:
    from neso.frontends.openai.access.api_keys import ApiKeys

RESTRICTED_GROUPS = ("inference", "model-repository", "metrics", "health")
"""Groups of routes that `--openai-restricted-api` can restrict, named as in Triton's OpenAI frontend."""
UNLIMITED = 0
OPEN_GROUPS = {
    "health": ("/health", "/ping"),
    "metrics": ("/metrics",),
    "docs": ("/docs", "/openapi.json", "/redoc"),
}
"""Groups of paths, with their sub-paths, that can be exempted from API keys."""


@dataclass(frozen=True, slots=True)
class Quota:
    """Requests and tokens per minute; 0 is unlimited."""

    requests: int = UNLIMITED
    tokens: int = UNLIMITED

    def __bool__(self) -> bool:
        """Whether either is limited."""
        return bool(self.requests or self.tokens)


@dataclass(frozen=True, slots=True)
class AccessOptions:
    """Access control.

    keys: accepted API keys; None disables authentication.
    open_groups: groups of `OPEN_GROUPS` that need no key.
    quota: default of each key; of each client address if there are no keys.
    origins: allowed CORS origins, ("*",) for all.
    """

    keys: ApiKeys | None = None
    open_groups: tuple[str, ...] = ("health",)
    quota: Quota = field(default_factory=Quota)
    origins: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class OpenAIOptions:
    """Options of the OpenAI frontend.

    max_body_size: bytes of a request body.
    default_max_tokens: `max_tokens` of completions that set none, and of chats with a model of unknown context length.
        Other chats generate up to the context length, as with OpenAI.
    tool_call_parser, reasoning_parser: parser names; "auto" selects by the chat template.
    max_tool_call_parse_bytes: longest tool call that is parsed.
    allowed_media_domains: domains that images are fetched from, ("*",) for any.
    tokenizer: directory or hub name; for models with text tensors that have no tokenizer of their own.
    chat_template: Jinja2 source or file that replaces the chat templates of all models.
    lora_separator: separates model and adapter in the names of adapters.
    max_stored_responses, max_stored_response_bytes: capacity of the Responses API's store.
    restrictions: restricted groups of all HTTP APIs; openai_restrictions: of this API (`RESTRICTED_GROUPS`).
    metrics: whether `GET /metrics` is served.
    """

    max_body_size: int = 64 * 1024 * 1024
    default_max_tokens: int = 16
    tool_call_parser: str = "auto"
    reasoning_parser: str = "auto"
    max_tool_call_parse_bytes: int = 131072
    allowed_media_domains: tuple[str, ...] = ()
    tokenizer: str = ""
    chat_template: str = ""
    lora_separator: str = ":"
    max_stored_responses: int = 1000
    max_stored_response_bytes: int = 256 * 1024 * 1024
    restrictions: Restrictions = field(default_factory=Restrictions)
    openai_restrictions: Restrictions = field(default_factory=Restrictions)
    access: AccessOptions = field(default_factory=AccessOptions)
    metrics: bool = True

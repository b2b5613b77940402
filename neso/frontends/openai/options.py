"""What the OpenAI front end can be told."""

from __future__ import annotations

from dataclasses import dataclass, field

from neso.frontends.openai.access.options import AccessOptions
from neso.frontends.security import Restrictions


@dataclass(frozen=True, slots=True)
class OpenAIOptions:
    """Options of the OpenAI front end.

    `default_max_tokens` is for completions that name no `max_tokens` (chats go on to the model's limit, as
    with OpenAI), and for chats with models of unknown context length. `tokenizer`, a directory or a name on the hub, is
    that of models which take text as tensors and have none of their own. `chat_template`: jinja2, in place of those of
    all models. `lora_separator` stands between the name of a model and that of an adapter.
    `tool_call_parser` and `reasoning_parser` name the formats in which the models write tool calls and reasoning,
    "auto": their chat templates tell. `max_tool_call_parse_bytes`: the longest call that is read.
    The last `max_stored_responses` of the Responses API are kept, as long as they take no more than
    `max_stored_response_bytes`.
    Images are fetched from `allowed_media_domains` ("*": any).
    `restrictions` are those of the whole of HTTP, `openai_restrictions` those of this API (`restricted.GROUPS`).
    `metrics`: `GET /metrics` is answered.
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

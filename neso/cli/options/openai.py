"""OpenAI's API."""

from __future__ import annotations

from typing import TYPE_CHECKING

from neso.cli.options.access import access_options, openai_restrictions
from neso.cli.options.errors import OptionError
from neso.cli.options.http import http_address, restrictions, tls_files
from neso.cli.options.kinds import BOOLEAN, FLAG, PATH, PORT, choice, integer
from neso.cli.options.option import Option, Topic
from neso.cli.options.values import Values

if TYPE_CHECKING:
    from neso.frontends.openai import OpenAIOptions
    from neso.frontends.transport.http1 import HttpServerOptions

OPENAI = Topic(
    "OpenAI",
    (
        Option("allow-openai", "Serve OpenAI's API, on its own port and under /v1 of HTTP.", BOOLEAN, True),
        Option("openai-address", "Where OpenAI's API listens.", metavar="HOST", default_text="that of HTTP"),
        Option("openai-port", "OpenAI's API.", PORT, 9000),
        Option(
            "openai-server-cert",
            "PEM file of the certificate of OpenAI's port; with it that port is HTTPS.",
            PATH,
            default_text="that of HTTP",
        ),
        Option("openai-server-key", "PEM file of the certificate's key.", PATH),
        Option(
            "openai-root-cert",
            "PEM file of the certificates that clients of OpenAI's port must show one below (mutual TLS).",
            PATH,
        ),
        Option(
            "tool-call-parser",
            "Format in which the models write tool calls; auto: their chat templates tell.",
            metavar="NAME",
            default="auto",
        ),
        Option(
            "reasoning-parser",
            "Format in which the models write what they think before they answer; none: it is content.",
            metavar="NAME",
            default="auto",
        ),
        Option("max-tool-call-parse-bytes", "Longest tool call that is read.", integer(1), 131072),
        Option(
            "allowed-media-domain",
            "Host that images of chats may be fetched from; * for any.",
            repeated=True,
            metavar="HOST",
            default_text="none: images come within the request",
        ),
        Option(
            "tokenizer",
            "Of models that take text as tensors and name no tokenizer_dir: a directory, or an org/name on the hub.",
        ),
        Option(
            "chat-template",
            "Jinja2 file in place of the chat templates of all models.",
            metavar="FILE",
        ),
        Option(
            "lora-separator",
            "Stands between the name of a model and that of its LoRA adapter: MODEL:ADAPTER.",
            default=":",
        ),
        Option("default-max-tokens", "max_tokens of OpenAI completions that name none.", integer(1), 16),
        Option(
            "backend",
            "How Triton's front end for OpenAI's API asks models.",
            choice("vllm", "tensorrtllm"),
            ignored="what a model declares tells how it is asked",
        ),
        Option(
            "enable-kserve-frontends",
            "Triton's front end for OpenAI's API serves KServe's protocols with it.",
            FLAG,
            ignored="they are served unless --allow-http and --allow-grpc are false",
        ),
        Option(
            "uvicorn-log-level",
            "How much Triton's front end for OpenAI's API logs.",
            ignored="see --log-verbose",
        ),
        Option("max-stored-responses", "Responses kept for the Responses API.", integer(0), 1000),
        Option(
            "max-stored-response-bytes",
            "Memory that responses kept for the Responses API may take.",
            integer(0),
            256 * 1024 * 1024,
        ),
    ),
)


def openai_options(values: Values) -> OpenAIOptions | None:
    """None if OpenAI's API is off."""
    from neso.frontends.openai import OpenAIOptions

    if not values["allow-openai"]:
        return None
    return OpenAIOptions(
        max_body_size=values["http-max-input-size"],
        default_max_tokens=values["default-max-tokens"],
        tool_call_parser=values["tool-call-parser"],
        reasoning_parser=values["reasoning-parser"],
        max_tool_call_parse_bytes=values["max-tool-call-parse-bytes"],
        allowed_media_domains=tuple(values["allowed-media-domain"] or ()),
        tokenizer=values["tokenizer"] or "",
        chat_template=values["chat-template"] or "",
        lora_separator=_separator(values["lora-separator"]),
        max_stored_responses=values["max-stored-responses"],
        max_stored_response_bytes=values["max-stored-response-bytes"],
        restrictions=restrictions(values),
        openai_restrictions=openai_restrictions(values),
        access=access_options(values),
        metrics=values["allow-metrics"],
    )


def _separator(text: str) -> str:
    if not text:
        raise OptionError("--lora-separator: must not be empty")
    return text


def openai_http_options(values: Values) -> HttpServerOptions:
    """Of the server on the port that OpenAI's API has for itself."""
    from neso.frontends.openai.errors import refusal_body
    from neso.frontends.transport.http1 import HttpServerOptions

    tls = tls_files(values, "openai") or tls_files(values)
    return HttpServerOptions(
        host=values["openai-address"] or http_address(values),
        port=values["openai-port"],
        max_body=values["http-max-input-size"],
        reuse_port=values["reuse-http-port"],
        tls=None if tls is None else tls.context("http/1.1"),
        rejection_body=refusal_body,
    )

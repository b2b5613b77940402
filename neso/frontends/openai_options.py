"""Options of the OpenAI API, with the flags of `neso serve` that set them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from neso.flags import PORT, Flag, FlagGroup, SameAs, integer
from neso.frontends.frontend_options import tls_files
from neso.frontends.security import Restrictions, TlsFiles
from neso.server.errors import InvalidArgument

if TYPE_CHECKING:
    from neso.frontends.openai.access.api_keys import ApiKeys
    from neso.frontends.transport.http1 import HttpServerOptions

API_KEY_VARIABLE = "NESO_API_KEY"
RESTRICTED_GROUPS = ("inference", "model-repository", "metrics", "health")
"""Groups of routes that `--openai-restricted-api` can restrict, with the names of Triton's OpenAI frontend."""
UNLIMITED = 0
OPEN_GROUPS = {
    "health": ("/health", "/ping"),
    "metrics": ("/metrics",),
    "docs": ("/docs", "/openapi.json", "/redoc"),
    "dashboard": ("/dashboard/state", "/dashboard/metrics"),
}
"""Paths, including their subpaths, that `--api-key-open` makes accessible without a key."""


@dataclass(frozen=True, slots=True)
class Quota:
    """Maximum requests and tokens per minute of a client; 0 means no limit."""

    requests: Annotated[
        int,
        Flag(
            "openai-requests-per-minute",
            "Maximum requests per minute and key; without keys, per address.",
            integer(1),
            default_text="no limit",
        ),
    ] = UNLIMITED
    tokens: Annotated[
        int,
        Flag(
            "openai-tokens-per-minute",
            "Maximum prompt and output tokens per minute and key; without keys, per address.",
            integer(1),
            default_text="no limit",
        ),
    ] = UNLIMITED

    def __bool__(self) -> bool:
        """Whether there is any limit."""
        return bool(self.requests or self.tokens)


def _api_keys(
    given: Annotated[
        Sequence[str],
        Flag(
            "api-key",
            f"Require one of these API keys in the OpenAI API. The environment variable {API_KEY_VARIABLE} adds one.",
            repeated=True,
            metavar="KEY",
        ),
    ],
    file: Annotated[
        Path | None,
        Flag(
            "api-key-file",
            "File with one [NAME:]KEY per line; reloaded when it changes and on SIGHUP.",
        ),
    ] = None,
) -> ApiKeys | None:
    keys = list(given)
    if os.environ.get(API_KEY_VARIABLE, "").strip():
        keys.append(os.environ[API_KEY_VARIABLE].strip())
    if not keys and file is None:
        return None
    from neso.frontends.openai.access.api_keys import ApiKeys

    try:
        return ApiKeys(keys, file)
    except InvalidArgument as error:
        flag = "--api-key" if file is None else "--api-key-file"
        raise InvalidArgument(f"{flag}: {error.message}") from None


def _open_groups(text: str) -> tuple[str, ...]:
    groups = tuple(name for name in text.split(",") if name not in ("", "nothing"))
    for name in groups:
        if name not in OPEN_GROUPS:
            raise InvalidArgument(f"expected some of {', '.join(OPEN_GROUPS)}, or nothing, got '{name}'")
    return groups


@dataclass(frozen=True, slots=True)
class AccessOptions:
    """Access to the OpenAI API.

    - keys: None means that no key is required
    - open_groups: groups of `OPEN_GROUPS` that require no key
    - quota: limits per key without its own limits; without keys, limits per client address
    - origins: web origins allowed by CORS, ("*",) for all
    """

    keys: Annotated[ApiKeys | None, FlagGroup(_api_keys)] = None
    open_groups: Annotated[
        tuple[str, ...],
        Flag(
            "api-key-open",
            "Groups of paths that require no key: health, metrics, docs, dashboard (states of models and charts), or "
            "nothing.",
            default="health,dashboard",
            metavar="GROUP[,GROUP...]",
            convert=_open_groups,
        ),
    ] = ("health", "dashboard")
    quota: Annotated[Quota, FlagGroup(Quota)] = field(default_factory=Quota)
    origins: Annotated[
        tuple[str, ...],
        Flag(
            "cors-allow-origin",
            "Origin of web pages that may use the OpenAI API (CORS); * allows all.",
            metavar="ORIGIN",
        ),
    ] = ()


def _openai_tls(
    certificate: Annotated[
        Path | None,
        Flag(
            "openai-server-cert",
            "PEM file of the server certificate; enables HTTPS on the OpenAI port.",
            default_text="that of HTTP",
        ),
    ] = None,
    key: Annotated[Path | None, Flag("openai-server-key", "PEM file of the certificate's key.")] = None,
    client_root: Annotated[
        Path | None,
        Flag(
            "openai-root-cert",
            "PEM file of the CA bundle used to verify client certificates on the OpenAI port (mutual TLS).",
        ),
    ] = None,
) -> TlsFiles | None:
    return tls_files("openai", certificate, key, client_root)


def _openai_restrictions(texts: list[str]) -> Restrictions:
    return Restrictions.parse(texts, known=RESTRICTED_GROUPS)


def _lora_separator(text: str) -> str:
    if not text:
        raise InvalidArgument("must not be empty")
    return text


@dataclass(frozen=True, slots=True)
class OpenAIOptions:
    """Options of the OpenAI API.

    - default_max_tokens: `max_tokens` of completions that do not set it, and of chats with models of unknown context
      length; other chats may use the whole context, as in the OpenAI API
    - tokenizer: tokenizer for tensor models that have none
    - tool_call_parser, reasoning_parser: "auto" detects the format by the chat template
    - allowed_media_domains: hosts from which images may be fetched, ("*",) for any
    - restrictions: restricted API groups of KServe; openai_restrictions: restricted groups of `RESTRICTED_GROUPS`
    - metrics: serve `GET /metrics`
    - dashboard: serve the web page at `/`
    - triton_compatibility: where Triton's OpenAI frontend differs from the OpenAI API, behave like the former
    - host, port, reuse_port, tls: settings of the API's own port; `create_app` ignores them
    """

    host: Annotated[
        str,
        Flag(
            "openai-address",
            "Address of the OpenAI API.",
            metavar="HOST",
            default_text="that of HTTP",
            fallback="http-address",
        ),
    ] = "0.0.0.0"
    port: Annotated[int, Flag("openai-port", "Port of the OpenAI API.", PORT)] = 9000
    tls: Annotated[TlsFiles | None, FlagGroup(_openai_tls)] = None
    reuse_port: Annotated[bool, SameAs("reuse-http-port")] = False
    max_body_size: Annotated[int, SameAs("http-max-input-size")] = 64 * 1024 * 1024
    max_json_values: Annotated[
        int,
        Flag(
            "openai-max-json-values",
            "Maximum number of JSON values of a request; a twentieth of it may be strings, and objects and arrays.",
            integer(20),
            topic="Limits",
        ),
    ] = 1_000_000
    max_head: Annotated[int, SameAs("http-max-header-size")] = 64 << 10
    header_timeout: Annotated[float, SameAs("http-header-timeout-secs")] = 20.0
    body_timeout: Annotated[float, SameAs("http-body-timeout-secs")] = 60.0
    keep_alive_timeout: Annotated[float, SameAs("http-idle-timeout-secs")] = 75.0
    write_timeout: Annotated[float, SameAs("http-write-timeout-secs")] = 60.0
    tool_call_parser: Annotated[
        str,
        Flag(
            "tool-call-parser",
            "Format of the models' tool calls; auto detects it by the chat template.",
            metavar="NAME",
        ),
    ] = "auto"
    reasoning_parser: Annotated[
        str,
        Flag(
            "reasoning-parser",
            "Format of the models' reasoning; auto detects it by the chat template, none leaves it in the content.",
            metavar="NAME",
        ),
    ] = "auto"
    max_tool_call_parse_bytes: Annotated[
        int, Flag("max-tool-call-parse-bytes", "Maximum size of a parsed tool call in bytes.", integer(1))
    ] = 131072
    allowed_media_domains: Annotated[
        tuple[str, ...],
        Flag(
            "allowed-media-domain",
            "Host that images of chats may be fetched from; * for any.",
            metavar="HOST",
            default_text="none, images must be part of the request",
        ),
    ] = ()
    tokenizer: Annotated[
        str,
        Flag(
            "tokenizer",
            "Tokenizer of models that take text as tensors and set no tokenizer_dir: a directory, or an org/name on "
            "the hub.",
        ),
    ] = ""
    chat_template: Annotated[
        str, Flag("chat-template", "Jinja2 file that replaces the models' chat templates.", metavar="FILE")
    ] = ""
    lora_separator: Annotated[
        str,
        Flag(
            "lora-separator",
            "Separator of a model name and a LoRA adapter name: MODEL:ADAPTER.",
            default=":",
            convert=_lora_separator,
        ),
    ] = ":"
    default_max_tokens: Annotated[
        int,
        Flag("default-max-tokens", "Default max_tokens of OpenAI completions.", integer(1)),
    ] = 16
    max_stored_responses: Annotated[
        int, Flag("max-stored-responses", "Maximum number of stored responses (Responses API).", integer(0))
    ] = 1000
    max_stored_response_bytes: Annotated[
        int,
        Flag(
            "max-stored-response-bytes",
            "Maximum memory of stored responses in bytes (Responses API).",
            integer(0),
        ),
    ] = 256 * 1024 * 1024
    restrictions: Annotated[Restrictions, SameAs("http-restricted-api")] = field(default_factory=Restrictions)
    openai_restrictions: Annotated[
        Restrictions,
        Flag(
            "openai-restricted-api",
            "Require the header KEY: VALUE for these groups of the OpenAI API: inference, model-repository, metrics, "
            "health. Also accepted as three arguments: GROUPS KEY VALUE.",
            repeated=True,
            metavar="GROUP[,GROUP...]:KEY=VALUE",
            topic="OpenAI access",
            convert=_openai_restrictions,
        ),
    ] = field(default_factory=Restrictions)
    access: Annotated[AccessOptions, FlagGroup(AccessOptions, topic="OpenAI access")] = field(
        default_factory=AccessOptions
    )
    metrics: Annotated[bool, SameAs("allow-metrics")] = True
    dashboard: Annotated[
        bool,
        Flag(
            "dashboard",
            "Serve a web page with models, charts and a playground at / of the HTTP and OpenAI ports.",
        ),
    ] = True
    triton_compatibility: Annotated[
        bool,
        Flag(
            "openai-triton-compatibility",
            "Use the error format and status codes of Triton's OpenAI frontend, and list models that do not generate "
            "text.",
        ),
    ] = False

    def server(self) -> HttpServerOptions:
        """Return the options of the API's own HTTP server. Raises `InvalidArgument` for unusable TLS files."""
        from neso.frontends.openai.errors import rejection_response
        from neso.frontends.transport.http1 import HttpServerOptions

        return HttpServerOptions(
            self.host,
            self.port,
            max_body=self.max_body_size,
            max_head=self.max_head,
            header_timeout=self.header_timeout,
            body_timeout=self.body_timeout,
            keep_alive_timeout=self.keep_alive_timeout,
            write_timeout=self.write_timeout,
            reuse_port=self.reuse_port,
            tls=None if self.tls is None else self.tls.context("http/1.1"),
            rejection=rejection_response,
        )

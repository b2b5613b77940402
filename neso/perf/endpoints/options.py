"""Options of the endpoint: models, server, protocol, connections."""

from __future__ import annotations

import ssl
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from neso.flags import PATH, SWITCH, Flag, choice, number
from neso.perf.errors import PerfError


@dataclass(frozen=True, slots=True)
class EndpointOptions:
    """Options of the endpoint. `urls` without scheme are http; "" for the in-process engine."""

    models: Annotated[
        tuple[str, ...],
        Flag(
            "model", "Model, or several models or LoRA adapters.", metavar="NAME...", aliases=("model-names",)
        ),
    ] = ()
    model_selection: Annotated[
        str,
        Flag(
            "model-selection-strategy",
            "How requests select one of several models or LoRA adapters.",
            choice("round_robin", "random"),
        ),
    ] = "round_robin"
    adapters: Annotated[
        tuple[str, ...],
        Flag(
            "lora-adapters",
            "LoRA adapters: as the model of an OpenAI endpoint, as lora_name of a Triton endpoint.",
            metavar="NAME...",
        ),
    ] = ()
    endpoint_type: Annotated[
        str,
        Flag(
            "endpoint-type",
            "Protocol of the requests: chat, completions, responses, embeddings, vision, rankings, generate, kserve, "
            "engine, or another type in the documentation; MODULE:CLASS for a type of your own.",
            default_text="chat; kserve with --service-kind triton",
        ),
    ] = ""
    service_kind: Annotated[
        str,
        Flag(
            "service-kind",
            "Kind of server, for command lines of older genai-perf versions. --endpoint-type replaces it.",
            choice("openai", "triton", "tensorrtllm_engine", "dynamic_grpc"),
        ),
    ] = ""
    urls: Annotated[
        tuple[str, ...],
        Flag(
            "url",
            "URL of the server; several URLs are used in turn.",
            metavar="URL...",
            default_text="localhost:8000",
        ),
    ] = ()
    path: Annotated[
        str,
        Flag("endpoint", "Path of the endpoint on the server.", metavar="PATH", aliases=("custom-endpoint",)),
    ] = ""
    streaming: Annotated[bool, Flag("streaming", "Request streamed responses.", SWITCH)] = False
    backend: Annotated[
        str,
        Flag(
            "backend",
            "Tensors of a language model behind KServe: vllm (text_input), tensorrtllm (the ensemble), engine (the "
            "token ids of tensorrt_llm), tensor (inputs from the model's metadata), or auto, by the metadata.",
            choice("auto", "vllm", "tensorrtllm", "engine", "tensor"),
        ),
    ] = "auto"
    grpc_method: Annotated[
        str,
        Flag("grpc-method", "Method of dynamic_grpc.", ignored="calls of kserve_grpc follow --streaming"),
    ] = ""
    headers: Annotated[
        tuple[str, ...], Flag("header", "Header of each request.", metavar="NAME:VALUE", aliases=("headers",))
    ] = ()
    api_key: Annotated[str, Flag("api-key", "API key, sent as a bearer token.")] = ""
    request_timeout: Annotated[
        float,
        Flag(
            "request-timeout-seconds",
            "Time until a request without a complete response fails, in seconds.",
            number(0),
        ),
    ] = 6 * 3600.0
    wait_for_model: Annotated[
        float,
        Flag(
            "wait-for-model-timeout", "Time to wait until the first request succeeds, in seconds.", number(0)
        ),
    ] = 0.0
    connections: Annotated[
        str,
        Flag(
            "connection-reuse-strategy",
            "Connections: pooled, never (a new one for each request), or sticky-user-sessions (one for each session).",
            choice("pooled", "never", "sticky-user-sessions"),
        ),
    ] = "pooled"
    legacy_max_tokens: Annotated[
        bool, Flag("use-legacy-max-tokens", "Send max_tokens instead of max_completion_tokens.", SWITCH)
    ] = False
    usage: Annotated[
        bool,
        Flag(
            "no-server-token-count",
            "Do not request the token usage of streams.",
            SWITCH,
            convert=lambda given: not given,
        ),
    ] = True
    per_chunk_usage: Annotated[
        bool, Flag("per-chunk-usage", "Request the token usage after each event of a stream.", SWITCH)
    ] = False
    ca_file: Annotated[
        Path | None,
        Flag(
            "ssl-ca-file",
            "CA bundle that verifies the server.",
            PATH,
            aliases=("ssl-https-ca-certificates-file", "ssl-grpc-root-certifications-file"),
        ),
    ] = None
    cert_file: Annotated[
        Path | None,
        Flag(
            "ssl-cert-file",
            "Client certificate.",
            PATH,
            aliases=("ssl-https-client-certificate-file", "ssl-grpc-certificate-chain-file"),
        ),
    ] = None
    key_file: Annotated[
        Path | None,
        Flag(
            "ssl-key-file",
            "Key of the client certificate.",
            PATH,
            aliases=("ssl-https-private-key-file", "ssl-grpc-private-key-file"),
        ),
    ] = None
    insecure: Annotated[bool, Flag("ssl-insecure", "Do not verify the server's certificate.", SWITCH)] = False
    engine_config: Annotated[
        tuple[str, ...],
        Flag("engine-config", "Option of the in-process engine, as in model.json.", metavar="KEY=VALUE"),
    ] = ()
    keep_text: bool = False
    """Keep the text of responses in the records."""
    extra: dict[str, object] = field(default_factory=dict)
    """Options of an endpoint of your own."""

    def __post_init__(self) -> None:
        if not self.endpoint_type:
            kind = {"triton": "kserve", "tensorrtllm_engine": "engine"}.get(self.service_kind, "chat")
            object.__setattr__(self, "endpoint_type", kind)
        if ":" not in self.endpoint_type:  # aiperf writes dashes
            object.__setattr__(self, "endpoint_type", self.endpoint_type.replace("-", "_").lower())
        for header in self.headers:
            name, separator, _ = header.partition(":")
            if not separator or not name.strip() or any(c in header for c in "\r\n\0"):
                raise PerfError(f"--header: expected NAME:VALUE, got '{header}'")
        if bool(self.cert_file) != bool(self.key_file):
            raise PerfError("--ssl-cert-file and --ssl-key-file must be given together")
        for flag, path in (("ca", self.ca_file), ("cert", self.cert_file), ("key", self.key_file)):
            if path is not None and not path.is_file():
                raise PerfError(f"--ssl-{flag}-file: no file '{path}'")

    @property
    def is_grpc(self) -> bool:
        """Whether requests are gRPC calls."""
        return self.endpoint_type in ("kserve", "kserve_grpc", "dynamic_grpc")

    @property
    def is_engine(self) -> bool:
        """Whether the model runs in an engine that the client starts."""
        return self.endpoint_type in ("engine", "tensorrtllm_engine")

    @property
    def server_urls(self) -> tuple[str, ...]:
        """URLs of the servers, or the default URL."""
        return self.urls or (f"localhost:{8001 if self.is_grpc else 8000}",)

    @property
    def header_list(self) -> list[tuple[str, str]]:
        """Additional headers, including that of the API key."""
        pairs = [header.partition(":")[::2] for header in self.headers]
        found = [(name.strip(), value.strip()) for name, value in pairs]
        if self.api_key:
            found.append(("Authorization", f"Bearer {self.api_key}"))
        return found

    def ssl_context(self) -> ssl.SSLContext:
        """Return the context of connections with TLS. Raises `PerfError` for invalid certificates."""
        try:
            context = ssl.create_default_context(cafile=self.ca_file)
            if self.cert_file and self.key_file:
                context.load_cert_chain(self.cert_file, self.key_file)
        except (OSError, ssl.SSLError) as error:
            raise PerfError(f"certificates cannot be read: {error}") from None
        if self.insecure:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        return context

"""Options of `neso serve`: options of the core and the frontends, built from the flags, and the MODEL arguments."""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from neso.cli.flag_values import FlagValues, OptionError
from neso.cli.serve_flags import ENGINE_CONFIG, ENGINE_FLAGS, FLAGS, LORA_MODULES, SPECULATIVE_CONFIG
from neso.flags import Flag
from neso.frontends.cloud_options import SageMakerOptions, VertexAiOptions, in_vertex_ai
from neso.frontends.frontend_options import (
    ConnectionOptions,
    GrpcOptions,
    HttpOptions,
    MetricsOptions,
    http_tls,
)
from neso.frontends.openai_options import OpenAIOptions
from neso.server.cache_options import CacheConfig
from neso.server.errors import ServerError, Unavailable
from neso.server.options import LogOptions, ServerOptions
from neso.server.trace_config import TRACING_UNSUPPORTED

SHIPPED_MODEL = "neso-pilot"


@dataclass(frozen=True, slots=True)
class ModelArgument:
    """A MODEL argument: served name and checkpoint."""

    name: str
    checkpoint: str

    @classmethod
    def parse(cls, text: str) -> ModelArgument:
        """Parse `NAME=CHECKPOINT` or `CHECKPOINT`, which is named after its last path part. Raises `OptionError`."""
        name, separator, checkpoint = text.partition("=")
        if not separator:
            name, checkpoint = Path(text).resolve().name if Path(text).exists() else text.split("/")[-1], text
            name = name.removesuffix(".gguf")
        if not name or not checkpoint:
            raise OptionError(f"model '{text}': expected CHECKPOINT or NAME=CHECKPOINT")
        return cls(name, checkpoint)


ENGINE_BACKENDS = ("llm", "neso", "tensorrtllm", "embedding")
"""Backends whose models run in engines; leader and orchestrator mode pass their settings to them."""


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """All options of `neso serve`. Disabled frontends are None.

    `engine`: options of the engines of `models`, as parameters of the `llm` backend. `rank_model`, `rank_address`: see
    `leader_mode`. `warnings`: messages about given
    options that have no effect.
    """

    server: ServerOptions
    models: tuple[ModelArgument, ...]
    engine: dict[str, str]
    connections: ConnectionOptions
    http: HttpOptions | None
    grpc: GrpcOptions | None
    metrics: MetricsOptions | None
    openai: OpenAIOptions | None
    log: LogOptions
    sagemaker: SageMakerOptions | None = None
    vertex_ai: VertexAiOptions | None = None
    warnings: tuple[str, ...] = ()
    rank_model: str | None = None
    rank_address: str | None = None
    multi_model: bool = False

    @classmethod
    def read(cls, command_line: Mapping[str, list[str]]) -> ServeOptions:
        """Parse the texts given for each flag. Raises `OptionError`."""
        values = FlagValues.read(FLAGS, command_line)
        try:
            options = cls._from_values(values)
            options._check_ports()
        except ServerError as error:
            raise OptionError(error.message) from None
        options._check_processes()
        return options

    @classmethod
    def _from_values(cls, values: FlagValues) -> ServeOptions:
        from neso.frontends.openai import check_model_config

        openai = values.build(OpenAIOptions) if values["allow-openai"] else None
        if openai is not None and openai.tls is None:
            openai = replace(openai, tls=values.build(http_tls))
        cache = values.build(CacheConfig.parse)
        server = values.build(
            ServerOptions,
            response_cache_size=cache.local_size,
            redis_cache=cache.redis,
            config_checks=() if openai is None else (check_model_config,),
        )
        # As in Triton: in a container of Vertex AI, other protocols are served on request only.
        in_vertex = in_vertex_ai()
        allowed = {
            name: values[f"allow-{name}"] and (values.given(f"allow-{name}") or not in_vertex)
            for name in ("http", "grpc")
        }
        http = values.build(HttpOptions)
        names = values["models"] or ([] if values["model-repository"] else [SHIPPED_MODEL])
        grpc = values.build(GrpcOptions) if allowed["grpc"] else None
        _warn_unencrypted_grpc(values, grpc)
        if openai is not None and openai.access.keys is not None:
            _warn_unrestricted_kserve(values)
        return cls(
            server=server,
            models=_models(names, values["served-model-name"]),
            engine=engine_options(values),
            connections=values.build(ConnectionOptions),
            http=http if allowed["http"] else None,
            grpc=grpc,
            metrics=values.build(MetricsOptions) if values["allow-metrics"] else None,
            openai=openai,
            log=values.build(LogOptions),
            sagemaker=_sagemaker(values, http),
            vertex_ai=_vertex_ai(values, http, default=in_vertex),
            warnings=tuple(values.warnings),
            rank_model=values["rank-model"],
            rank_address=values["rank-address"],
            multi_model=bool(values["multi-model"]),
        )

    def _check_processes(self) -> None:
        """Raise `OptionError` for an option that several server processes do not support."""
        if self.connections.num_processes == 1:
            return
        if sys.platform != "linux":
            raise OptionError("--server-processes greater than 1 needs Linux")
        if self.server.trace.setting.level:
            raise OptionError(f"--trace-config: {TRACING_UNSUPPORTED}")

    def sharing_ports(self) -> ServeOptions:
        """Return the options of each process of a server: the same ports, and an equal part of the memory."""
        connections = self.connections
        part = connections.max_body_memory // connections.num_processes
        largest = 0 if self.http is None else self.http.max_input_size
        return replace(
            self,
            connections=replace(connections, max_body_memory=max(part, largest, 1)),
            http=None if self.http is None else replace(self.http, reuse_port=True),
            grpc=None if self.grpc is None else self._grpc_of_one_process(self.grpc),
            openai=None if self.openai is None else replace(self.openai, reuse_port=True),
        )

    def _grpc_of_one_process(self, grpc: GrpcOptions) -> GrpcOptions:
        """Return gRPC options with an equal part of the memory for requests."""
        part = grpc.max_memory // self.connections.num_processes
        return replace(grpc, reuse_port=True, max_memory=max(part, grpc.max_connection_memory))

    def with_ports(self, ports: Mapping[str, int]) -> ServeOptions:
        """Return the options of a front-end process: the ports that are in use, without the metrics frontend."""
        return replace(
            self,
            http=None if self.http is None else replace(self.http, port=ports["http"]),
            grpc=None if self.grpc is None else replace(self.grpc, port=ports["grpc"]),
            openai=None if self.openai is None else replace(self.openai, port=ports["openai"]),
            metrics=None,
            sagemaker=None,
            vertex_ai=None,
        )

    def check_ports_free(self) -> None:
        """Raise `Unavailable` if another server listens on a port; processes that share ports cannot detect it."""
        for frontend in (self.http, self.grpc, self.openai):
            if frontend is not None and frontend.port and not frontend.reuse_port:
                check_port_free(frontend.host, frontend.port)

    def _check_ports(self) -> None:
        """Raise `OptionError` if two frontends have the same address and port."""
        addresses = [
            (name, options.host, options.port)
            for name, options in (
                ("HTTP", self.http),
                ("gRPC", self.grpc),
                ("metrics", self.metrics),
                ("OpenAI", self.openai),
            )
            if options is not None
        ]
        if self.sagemaker is not None:
            for name, _, port in addresses:
                self.sagemaker.check_port(name, port)
            addresses.append(("SageMaker", self.sagemaker.http.host, self.sagemaker.port))
        if self.vertex_ai is not None and self.vertex_ai.port is not None:
            addresses.append(("Vertex AI", self.vertex_ai.http.host, self.vertex_ai.port))
        used: dict[tuple[str, int], str] = {}
        for name, host, port in addresses:
            if port and (host, port) in used:
                raise OptionError(
                    f"the server cannot listen to {used[host, port]} requests and {name} requests at the same "
                    f"address and port {host}:{port}"
                )
            used[host, port] = name


def check_port_free(host: str, port: int) -> None:
    """Raise `Unavailable` if the port is in use. The frontends report an unknown host."""
    try:
        places = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except socket.gaierror:
        return
    for family, kind, protocol, _, address in places:
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            try:
                probe.bind(address)
            except OSError as error:
                raise Unavailable(f"cannot listen on {host}:{port}: {error.strerror}") from None


def _models(texts: list[str], served_name: str | None) -> tuple[ModelArgument, ...]:
    models = tuple(ModelArgument.parse(text) for text in texts)
    if served_name is None:
        return models
    if len(models) != 1:
        raise OptionError("--served-model-name names a single MODEL; name several as NAME=MODEL")
    return (ModelArgument.parse(f"{served_name}={models[0].checkpoint}"),)


def _sagemaker(values: FlagValues, http: HttpOptions) -> SageMakerOptions | None:
    if not values["allow-sagemaker"]:
        return None
    return values.build(SageMakerOptions, http=http).with_environment()


def _vertex_ai(values: FlagValues, http: HttpOptions, *, default: bool) -> VertexAiOptions | None:
    allowed = values["allow-vertex-ai"] if values.given("allow-vertex-ai") else default
    return values.build(VertexAiOptions, http=http).with_environment() if allowed else None


def _warn_unencrypted_grpc(values: FlagValues, grpc: GrpcOptions | None) -> None:
    if grpc is None or grpc.tls is not None:
        return
    for name in ("grpc-server-cert", "grpc-server-key", "grpc-root-cert"):
        if values.given(name):
            values.warnings.append(
                f"--{name} has no effect without --grpc-use-ssl=true: gRPC is not encrypted"
            )


def _warn_unrestricted_kserve(values: FlagValues) -> None:
    """Warn if models can be used without an API key."""
    settings = {"http": values["http-restricted-api"], "grpc": values["grpc-restricted-protocol"]}
    unrestricted = [
        f"--allow-{name}=false"
        for name, groups in settings.items()
        if values[f"allow-{name}"] and not any("inference" in text.partition(":")[0] for text in groups)
    ]
    if unrestricted:
        values.warnings.append(
            "only the OpenAI API requires API keys, the KServe protocols do not: restrict them, or use "
            + " ".join(unrestricted)
        )


def engine_options(values: FlagValues) -> dict[str, str]:
    """Return the given engine options. Raises `OptionError` if one is set by two flags."""
    options: dict[str, str] = {}
    for flag, name, value in _engine_settings(values):
        if name in options:
            raise OptionError(f"{flag.option}: '{name}' is given twice")
        options[name] = value
    return options


def _engine_settings(values: FlagValues) -> Iterator[tuple[Flag, str, str]]:
    """Yield flag, engine option and value."""
    for flag in ENGINE_FLAGS:
        if values.given(flag.name):  # also false for a flag that the command does not have
            yield flag, flag.name.replace("-", "_"), _to_text(values[flag.name])
    if values["lora-modules"]:
        yield LORA_MODULES, "lora_modules", json.dumps(_lora_modules(values["lora-modules"]))
    names = {"method": "speculative", "model": "speculative_model"}
    for key, value in (values["speculative-config"] or {}).items():
        yield SPECULATIVE_CONFIG, names.get(key, key), _to_text(value)
    for text in values["engine-config"]:
        yield (ENGINE_CONFIG, *_pair(ENGINE_CONFIG, text))


def _lora_modules(texts: list[str]) -> dict[str, str]:
    """Return the directories of adapters by name."""
    adapters: dict[str, str] = {}
    for text in texts:
        name, path = _pair(LORA_MODULES, text)
        if name in adapters:
            raise OptionError(f"--lora-modules: '{name}' is given twice")
        adapters[name] = path
    return adapters


def _pair(flag: Flag, text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (name and equals and value):
        raise OptionError(f"{flag.option}: expected {flag.metavar}, got '{text}'")
    return name, value


def _to_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)

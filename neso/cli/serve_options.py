"""From the command line's texts to the options of the core and the front ends."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from neso.cli.options import OPTIONS
from neso.cli.options.cache import cache_options
from neso.cli.options.engine import engine_options
from neso.cli.options.errors import OptionError
from neso.cli.options.grpc import grpc_options
from neso.cli.options.http import http_options
from neso.cli.options.logging import log_options
from neso.cli.options.metrics import measured, metrics_options
from neso.cli.options.openai import openai_http_options, openai_options
from neso.cli.options.rate_limiter import rate_limiter_options
from neso.cli.options.repository import repository_options
from neso.cli.options.tracing import trace_config
from neso.cli.options.values import Values
from neso.frontends.kserve.grpc_options import GrpcOptions
from neso.frontends.kserve.http_options import HttpOptions
from neso.frontends.metrics import MetricsOptions
from neso.frontends.openai import OpenAIOptions
from neso.frontends.transport.http1 import HttpServerOptions
from neso.server.errors import ServerError
from neso.server.log import LogOptions
from neso.server.options import ServerOptions

SHIPPED_MODEL = "neso-pilot"


@dataclass(frozen=True, slots=True)
class ModelArgument:
    """A MODEL of the command line: the name to serve it by, and where its checkpoint is."""

    name: str
    checkpoint: str

    @classmethod
    def parse(cls, text: str) -> ModelArgument:
        """`NAME=CHECKPOINT` or `CHECKPOINT`, which is then served by the last part of its path."""
        name, separator, checkpoint = text.partition("=")
        if not separator:
            name, checkpoint = Path(text).resolve().name if Path(text).exists() else text.split("/")[-1], text
            name = name.removesuffix(".gguf")
        if not name or not checkpoint:
            raise OptionError(f"model '{text}': expected CHECKPOINT or NAME=CHECKPOINT")
        return cls(name, checkpoint)


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """All that `neso serve` was told. Front ends that are switched off are None.

    `warnings` are for the log: what was given and has no effect.
    """

    server: ServerOptions
    models: tuple[ModelArgument, ...]
    engine: dict[str, str]
    http: HttpOptions | None
    grpc: GrpcOptions | None
    metrics: MetricsOptions | None
    openai: OpenAIOptions | None
    openai_http: HttpServerOptions
    log: LogOptions
    warnings: tuple[str, ...] = ()

    @classmethod
    def read(cls, command_line: Mapping[str, list[str]]) -> ServeOptions:
        """From the texts that each option was given, by its name. Raises `OptionError`."""
        values = Values.read(OPTIONS, command_line)
        try:
            options = cls._from_values(values)
        except ServerError as error:
            raise OptionError(error.message) from None
        options._check_ports()
        return options

    @classmethod
    def _from_values(cls, values: Values) -> ServeOptions:
        from neso.frontends.openai import check_model_config

        names = values["models"] or ([] if values["model-repository"] else [SHIPPED_MODEL])
        openai = openai_options(values)
        server = ServerOptions(
            **repository_options(values),
            **rate_limiter_options(values),
            **cache_options(values),
            server_id=values["id"],
            exit_timeout=values["exit-timeout-secs"],
            allow_client_shm=values["allow-client-shm"],
            metrics=measured(values),
            trace=trace_config(values),
            config_checks=() if openai is None else (check_model_config,),
        )
        return cls(
            server=server,
            models=_models(names, values["served-model-name"]),
            engine=engine_options(values),
            http=http_options(values),
            grpc=grpc_options(values),
            metrics=metrics_options(values),
            openai=openai,
            openai_http=openai_http_options(values),
            log=log_options(values),
            warnings=tuple(values.warnings),
        )

    def _check_ports(self) -> None:
        """Raises `OptionError` when two front ends would listen at one place."""
        openai = self.openai_http if self.openai is not None else None
        taken: dict[tuple[str, int], str] = {}
        for name, options in (
            ("HTTP", self.http),
            ("gRPC", self.grpc),
            ("metrics", self.metrics),
            ("OpenAI", openai),
        ):
            if options is None or options.port == 0:
                continue
            place = (options.host, options.port)
            if place in taken:
                raise OptionError(
                    f"the server cannot listen to {taken[place]} requests and {name} requests at the same "
                    f"address and port {options.host}:{options.port}"
                )
            taken[place] = name


def _models(texts: list[str], served_name: str | None) -> tuple[ModelArgument, ...]:
    """The MODELs. Raises `OptionError`."""
    models = tuple(ModelArgument.parse(text) for text in texts)
    if served_name is None:
        return models
    if len(models) != 1:
        raise OptionError("--served-model-name is the name of one MODEL; of several, give each as NAME=MODEL")
    return (ModelArgument.parse(f"{served_name}={models[0].checkpoint}"),)

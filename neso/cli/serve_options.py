"""From the command line's values to the options of the core and the front ends."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from neso.frontends.http import HttpServerOptions
from neso.frontends.kserve_grpc.options import GrpcOptions, ResponseCompression
from neso.frontends.kserve_http.options import HttpOptions
from neso.frontends.metrics import MetricsOptions
from neso.frontends.openai import OpenAIOptions
from neso.server.errors import InvalidArgument
from neso.server.options import ModelControlMode, ServerOptions
from neso.server.response_cache.options import CacheConfig

SHIPPED_MODEL = "neso-pilot"
ENGINE_OPTIONS = (
    "runner",
    "dtype",
    "quantization",
    "num_threads",
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "kv_cache_memory",
)


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
            raise InvalidArgument(f"model '{text}': expected CHECKPOINT or NAME=CHECKPOINT")
        return cls(name, checkpoint)


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """All that `neso serve` was told. Front ends that are switched off are None."""

    server: ServerOptions
    models: tuple[ModelArgument, ...]
    engine: dict[str, str]
    http: HttpOptions | None
    grpc: GrpcOptions | None
    metrics: MetricsOptions | None
    openai: OpenAIOptions | None
    openai_http: HttpServerOptions
    verbose: bool

    @classmethod
    def from_values(cls, values: dict[str, Any]) -> ServeOptions:
        """From the parameters of `neso.cli.serve.serve`. Raises `ServerError`."""
        repositories = tuple(values["model_repository"] or ())
        names = values["models"] or ([] if repositories else [SHIPPED_MODEL])
        engine = {name: str(values[name]) for name in ENGINE_OPTIONS if values[name] is not None}
        cache = CacheConfig.parse(values["cache_config"] or [], values["response_cache_byte_size"])
        return cls(
            server=ServerOptions(
                model_repository=repositories,
                model_control_mode=ModelControlMode(values["model_control_mode"].value),
                startup_models=tuple(values["load_model"] or ()),
                strict_readiness=bool(values["strict_readiness"]),
                exit_on_error=bool(values["exit_on_error"]),
                exit_timeout=values["exit_timeout_secs"],
                disable_auto_complete_config=values["disable_auto_complete_config"],
                backend_config=_backend_config(values["backend_config"] or []),
                response_cache_size=cache.local_size,
                redis_cache=cache.redis,
                allow_client_shm=bool(values["allow_client_shm"]),
            ),
            models=tuple(ModelArgument.parse(name) for name in names),
            engine=engine,
            http=HttpOptions(values["http_address"], values["http_port"], values["http_max_input_size"])
            if values["allow_http"]
            else None,
            grpc=GrpcOptions(
                values["grpc_address"],
                values["grpc_port"],
                response_compression=ResponseCompression(
                    values["grpc_infer_response_compression_level"].value
                ),
            )
            if values["allow_grpc"]
            else None,
            metrics=MetricsOptions(values["metrics_address"], values["metrics_port"])
            if values["allow_metrics"]
            else None,
            openai=OpenAIOptions(
                max_body_size=values["http_max_input_size"],
                default_max_tokens=values["default_max_tokens"],
                tool_call_parser=values["tool_call_parser"],
            )
            if values["allow_openai"]
            else None,
            openai_http=HttpServerOptions(
                host=values["openai_address"],
                port=values["openai_port"],
                max_body=values["http_max_input_size"],
            ),
            verbose=values["log_verbose"] > 0,
        )


def _backend_config(settings: list[str]) -> dict[str, dict[str, str]]:
    result: dict[str, dict[str, str]] = {}
    for setting in settings:
        backend, comma, pair = setting.partition(",")
        key, equals, value = pair.partition("=")
        if not (backend and comma and key and equals):
            raise InvalidArgument(f"--backend-config '{setting}': expected BACKEND,KEY=VALUE")
        result.setdefault(backend, {})[key] = value
    return result

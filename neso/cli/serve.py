"""`neso serve`: the options, by tritonserver's names where the thing is the same."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer

MODELS = "Models"
ENGINE = "Engine (for models named on the command line)"
PORTS = "Ports"
PROCESS = "Process"


class ControlMode(str, Enum):
    """Values of --model-control-mode."""

    none = "none"
    explicit = "explicit"


class CompressionLevel(str, Enum):
    """Values of --grpc-infer-response-compression-level."""

    none = "none"
    low = "low"
    medium = "medium"
    high = "high"


class Switch(str, Enum):
    """true or false, written out as tritonserver takes them."""

    true = "true"
    false = "false"

    def __bool__(self) -> bool:
        return self is Switch.true


def _option(help: str, panel: str, **extra: Any) -> Any:
    return typer.Option(help=help, rich_help_panel=panel, **extra)


def serve(
    models: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[MODEL]...",
            help="Checkpoints in Hugging Face's layout: a directory, an org/name on the hub, or NAME=either to "
            "choose the name. Without any MODEL or repository: the small model that ships inside.",
        ),
    ] = None,
    model_repository: Annotated[
        list[Path] | None,
        _option("Directory of models in Triton's layout. May be given several times.", MODELS, metavar="DIR"),
    ] = None,
    model_control_mode: Annotated[
        ControlMode,
        _option("none: load all models at start. explicit: those of --load-model, then by request.", MODELS),
    ] = ControlMode.none,
    load_model: Annotated[
        list[str] | None,
        _option("Model to load at start in explicit mode, * for all. May be given several times.", MODELS),
    ] = None,
    disable_auto_complete_config: Annotated[
        bool,
        typer.Option(
            "--disable-auto-complete-config", help="Take config.pbtxt as it is.", rich_help_panel=MODELS
        ),
    ] = False,
    backend_config: Annotated[
        list[str] | None,
        _option("Setting of a backend, as BACKEND,KEY=VALUE. May be given several times.", MODELS),
    ] = None,
    cache_config: Annotated[
        list[str] | None,
        _option(
            "Cache the responses of models that enable it, in so many bytes: local,size=BYTES.",
            MODELS,
            show_default="no cache",
        ),
    ] = None,
    response_cache_byte_size: Annotated[
        int | None, _option("The same as --cache-config=local,size=BYTES.", MODELS, show_default="no cache")
    ] = None,
    strict_readiness: Annotated[
        Switch, _option("Ready only while every model that was to be loaded is ready.", MODELS)
    ] = Switch.true,
    exit_on_error: Annotated[
        Switch, _option("Exit if a model cannot be loaded at start.", MODELS)
    ] = Switch.false,
    runner: Annotated[str, _option("What executes the model; auto takes the fastest here.", ENGINE)] = "auto",
    dtype: Annotated[
        str | None,
        _option(
            "Of weights and activations: float32, float16, bfloat16.", ENGINE, show_default="the model's"
        ),
    ] = None,
    quantization: Annotated[
        str | None,
        _option(
            "Quantize dense weights while loading: int8, int4, int8_dynamic.", ENGINE, show_default="none"
        ),
    ] = None,
    num_threads: Annotated[
        int | None, _option("Threads of each engine on a CPU.", ENGINE, show_default="all cores")
    ] = None,
    max_model_len: Annotated[
        int | None,
        _option("Longest prompt and output together, in tokens.", ENGINE, show_default="the model's"),
    ] = None,
    max_num_seqs: Annotated[
        int | None, _option("Most sequences in one step.", ENGINE, show_default="64")
    ] = None,
    max_num_batched_tokens: Annotated[
        int | None, _option("Token budget of one step.", ENGINE, show_default="1024")
    ] = None,
    kv_cache_memory: Annotated[
        int | None,
        _option(
            "Size of the key-value cache, in bytes.",
            ENGINE,
            show_default="a quarter of the free memory at most",
        ),
    ] = None,
    http_address: Annotated[str, _option("Where KServe's HTTP listens.", PORTS)] = "0.0.0.0",
    http_port: Annotated[int, _option("KServe over HTTP, and OpenAI's API under /v1.", PORTS)] = 8000,
    http_max_input_size: Annotated[int, _option("Largest request body, in bytes.", PORTS)] = 64 << 20,
    grpc_address: Annotated[str, _option("Where gRPC listens.", PORTS)] = "0.0.0.0",
    grpc_port: Annotated[int, _option("KServe over gRPC.", PORTS)] = 8001,
    grpc_infer_response_compression_level: Annotated[
        CompressionLevel, _option("Compress gRPC responses; any level but none is gzip.", PORTS)
    ] = CompressionLevel.none,
    metrics_address: Annotated[str, _option("Where the metrics listen.", PORTS)] = "0.0.0.0",
    metrics_port: Annotated[int, _option("Prometheus metrics.", PORTS)] = 8002,
    openai_address: Annotated[str, _option("Where OpenAI's API listens.", PORTS)] = "0.0.0.0",
    openai_port: Annotated[int, _option("OpenAI's API.", PORTS)] = 9000,
    allow_http: Annotated[Switch, _option("Serve HTTP.", PORTS)] = Switch.true,
    allow_grpc: Annotated[Switch, _option("Serve gRPC.", PORTS)] = Switch.true,
    allow_metrics: Annotated[Switch, _option("Serve metrics.", PORTS)] = Switch.true,
    allow_openai: Annotated[
        Switch, _option("Serve OpenAI's API, on its own port and under /v1.", PORTS)
    ] = Switch.true,
    allow_client_shm: Annotated[
        Switch, _option("Let clients have tensors read from and written to system shared memory.", PORTS)
    ] = Switch.false,
    tool_call_parser: Annotated[
        str, _option("Format in which the models write tool calls.", PORTS)
    ] = "hermes",
    default_max_tokens: Annotated[
        int, _option("max_tokens of OpenAI completions that name none.", PORTS)
    ] = 16,
    exit_timeout_secs: Annotated[
        float, _option("How long requests in flight may take to end at exit.", PROCESS)
    ] = 30.0,
    log_verbose: Annotated[int, _option("0: what matters. 1: more, for debugging.", PROCESS)] = 0,
) -> None:
    """Collect the options and serve until a signal comes."""
    options = dict(locals())
    from neso.cli.serving import run

    raise typer.Exit(run(options))

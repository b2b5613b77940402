"""Options of `neso serve`: its flags, and the options of the core and the front ends made of them.

Most flags are declared on the options that they set. Declared here are the flags of the command itself and those of
tritonserver that have no effect.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from neso.cli.flag_values import FlagValues, OptionError
from neso.flags import BOOLEAN, JSON_OBJECT, PATH, PORT, SWITCH, Flag, choice, flags_of, integer, number
from neso.frontends.frontend_options import GrpcOptions, HttpOptions, MetricsOptions, http_tls
from neso.frontends.openai_options import OpenAIOptions
from neso.server.cache_options import CacheConfig
from neso.server.errors import ServerError
from neso.server.options import LogOptions, ServerOptions

SHIPPED_MODEL = "neso-pilot"

ENGINE_FLAGS = (
    Flag("runner", "Runner that executes the model; auto selects the fastest available.", default="auto"),
    Flag(
        "dtype",
        "Type of weights and activations; auto is the checkpoint's: float32, float16, bfloat16.",
        default_text="auto",
    ),
    Flag(
        "quantization",
        "Quantize dense weights while loading: int8, int4, int8_dynamic, fp8.",
        default_text="none",
    ),
    Flag(
        "num-threads",
        "Threads of a CPU runner; by default the physical cores within the CPU quota.",
        integer(1),
    ),
    Flag(
        "max-model-len",
        "Maximum number of prompt and output tokens; the model's by default.",
        integer(1),
    ),
    Flag("max-num-seqs", "Maximum number of sequences in a step.", integer(1), default_text="64"),
    Flag("max-num-batched-tokens", "Token budget of a step.", integer(1), default_text="1024"),
    Flag(
        "kv-cache-memory",
        "Size of the KV cache in bytes.",
        integer(1),
        default_text="at most a quarter of the free memory",
    ),
    Flag(
        "generation-config",
        "Source of sampling defaults: auto (checkpoint), vllm (none), or a directory.",
        metavar="auto|vllm|PATH",
        default_text="auto",
    ),
    Flag(
        "override-generation-config",
        'Sampling defaults that override those of the file: {"temperature": 0.5}.',
        JSON_OBJECT,
    ),
    Flag("enable-lora", "Enable LoRA adapters; --lora-modules enables them too.", SWITCH),
    Flag(
        "max-loras",
        "Maximum number of adapters in a step; requests for others wait.",
        integer(1),
        default_text="8",
    ),
    Flag("max-lora-rank", "Maximum rank of an adapter.", integer(1), default_text="64"),
)
"""Engine options with a flag of their own, which has dashes in place of underscores.

`neso.engine.config` declares the options. It is not imported here because it needs numpy, which `--help` must not
load; a test compares the names, help texts and defaults.
"""
_LORA_MODULES = Flag("lora-modules", "LoRA adapter to load at start.", repeated=True, metavar="NAME=PATH")
_SPECULATIVE = Flag(
    "speculative-config",
    'Speculative decoding: {"method": "ngram", "num_speculative_tokens": 4}; "model" is the draft model.',
    JSON_OBJECT,
)
_ENGINE_CONFIG = Flag(
    "engine-config", "Any engine option, by its name in model.json.", repeated=True, metavar="KEY=VALUE"
)

_NO_REQUEST_POOLS = "requests and responses are not pooled"
_NO_MEMORY_POOLS = "the server has no memory pools, engines manage their own"
_SAGEMAKER = "SageMaker endpoints are not served"
_VERTEX = "Vertex AI endpoints are not served"

COMMAND_FLAGS: dict[str, tuple[Flag, ...]] = {
    "Models": (
        Flag("served-model-name", "Name of the MODEL; the same as NAME=MODEL.", metavar="NAME"),
        Flag(
            "backend-directory",
            "Directory of tritonserver's backend libraries.",
            PATH,
            ignored="backends are Python code of the package or of the model's folder",
        ),
        Flag(
            "repoagent-directory",
            "Directory of tritonserver's repository agents.",
            PATH,
            ignored="repository agents are part of the package",
        ),
    ),
    "Engine (for models named on the command line)": (
        *ENGINE_FLAGS,
        _LORA_MODULES,
        _SPECULATIVE,
        _ENGINE_CONFIG,
    ),
    "HTTP": (
        Flag("allow-http", "Enable the HTTP front end.", BOOLEAN, True),
        Flag(
            "http-thread-count",
            "Number of tritonserver's HTTP threads.",
            integer(1),
            ignored="one event loop handles all connections",
        ),
    ),
    "gRPC": (
        Flag("allow-grpc", "Enable the gRPC front end.", BOOLEAN, True),
        Flag(
            "grpc-http2-max-pings-without-data",
            "Maximum number of pings without data between them.",
            integer(0),
            2,
            ignored="--grpc-keepalive-time sets the interval of pings",
        ),
        Flag(
            "grpc-infer-thread-count",
            "Number of tritonserver's gRPC inference threads.",
            integer(1),
            ignored="one event loop handles all calls",
        ),
        Flag(
            "grpc-infer-allocation-pool-size",
            "Size of tritonserver's pool of request objects.",
            integer(0),
            ignored=_NO_REQUEST_POOLS,
        ),
        Flag(
            "grpc-max-response-pool-size",
            "Size of tritonserver's pool of response objects of a stream.",
            integer(0),
            ignored=_NO_REQUEST_POOLS,
        ),
    ),
    "OpenAI": (
        Flag("allow-openai", "Enable the OpenAI API, on its own port and under /v1 of HTTP.", BOOLEAN, True),
        Flag(
            "backend",
            "Backend of Triton's OpenAI front end.",
            choice("vllm", "tensorrtllm"),
            ignored="requests follow the inputs that a model declares",
        ),
        Flag(
            "enable-kserve-frontends",
            "Serve the KServe protocols beside Triton's OpenAI front end.",
            SWITCH,
            ignored="they are served unless --allow-http and --allow-grpc are false",
        ),
        Flag("uvicorn-log-level", "Log level of Triton's OpenAI front end.", ignored="see --log-verbose"),
    ),
    "OpenAI access": (),
    "Metrics": (Flag("allow-metrics", "Enable the metrics front end.", BOOLEAN, True),),
    "Process": (
        Flag("config", "YAML file with names of options as keys. The command line takes precedence.", PATH),
        Flag(
            "host",
            "Default address of HTTP, gRPC, the OpenAI API and the metrics.",
            default="0.0.0.0",
        ),
    ),
    "Logging": (),
    "Tracing": (),
    "Response cache": (
        Flag(
            "cache-directory",
            "Directory of tritonserver's cache libraries.",
            PATH,
            ignored="caches are part of the package",
        ),
    ),
    "Rate limiter": (),
    "Memory and devices": (
        Flag(
            "pinned-memory-pool-byte-size",
            "Size of the pinned memory pool.",
            integer(0),
            ignored=_NO_MEMORY_POOLS,
        ),
        Flag(
            "cuda-memory-pool-byte-size",
            "Size of the memory pool of a GPU.",
            repeated=True,
            metavar="GPU:BYTES",
            ignored=_NO_MEMORY_POOLS,
        ),
        Flag(
            "cuda-virtual-address-size",
            "Address space of implicit states on a GPU.",
            repeated=True,
            metavar="GPU:BYTES",
            ignored="implicit states are in host memory",
        ),
        Flag(
            "min-supported-compute-capability",
            "Minimum compute capability of tritonserver's GPUs.",
            number(),
            ignored="each backend selects its devices",
        ),
        Flag(
            "buffer-manager-thread-count",
            "Number of tritonserver's threads that copy tensors.",
            integer(0),
            ignored="tensors are not gathered into server buffers",
        ),
        Flag(
            "host-policy",
            "NUMA node and cores of instances.",
            repeated=True,
            metavar="POLICY,KEY=VALUE",
            ignored="the operating system places threads and processes, see numactl and taskset",
        ),
        Flag(
            "model-load-gpu-limit",
            "Maximum share of a GPU's memory for loading models.",
            repeated=True,
            metavar="GPU:FRACTION",
            ignored="engine options set the memory of an engine",
        ),
        Flag(
            "enable-peer-access",
            "Direct access between GPUs.",
            BOOLEAN,
            ignored="the server copies nothing between GPUs",
        ),
    ),
    "Cloud endpoints": (
        Flag("allow-sagemaker", "Enable SageMaker endpoints.", BOOLEAN, False, ignored=_SAGEMAKER),
        Flag("sagemaker-port", "Port of the SageMaker endpoints.", PORT, ignored=_SAGEMAKER),
        Flag(
            "sagemaker-safe-port-range",
            "Ports allowed for other endpoints.",
            metavar="FROM-TO",
            ignored=_SAGEMAKER,
        ),
        Flag(
            "sagemaker-thread-count",
            "Number of threads of the SageMaker endpoints.",
            integer(1),
            ignored=_SAGEMAKER,
        ),
        Flag("allow-vertex-ai", "Enable Vertex AI endpoints.", BOOLEAN, False, ignored=_VERTEX),
        Flag("vertex-ai-port", "Port of the Vertex AI endpoints.", PORT, ignored=_VERTEX),
        Flag(
            "vertex-ai-thread-count",
            "Number of threads of the Vertex AI endpoints.",
            integer(1),
            ignored=_VERTEX,
        ),
        Flag("vertex-ai-default-model", "Default model of the Vertex AI endpoints.", ignored=_VERTEX),
    ),
}
"""Flags that no options class declares. The topics are those of the help, in its order."""


def _topics() -> dict[str, tuple[Flag, ...]]:
    """All flags, by topic."""
    declared = [
        *flags_of(ServerOptions, "Models"),
        *flags_of(CacheConfig.parse, "Response cache"),
        *flags_of(HttpOptions, "HTTP"),
        *flags_of(GrpcOptions, "gRPC"),
        *flags_of(OpenAIOptions, "OpenAI"),
        *flags_of(MetricsOptions, "Metrics"),
        *flags_of(LogOptions, "Logging"),
    ]
    topics = {}
    for topic, flags in COMMAND_FLAGS.items():
        effective = [flag for flag in flags if not flag.ignored]
        ignored = [flag for flag in flags if flag.ignored]
        topics[topic] = (*effective, *(flag for flag in declared if flag.topic == topic), *ignored)
    return topics


TOPICS = _topics()
FLAGS: tuple[Flag, ...] = tuple(flag for flags in TOPICS.values() for flag in flags)


@dataclass(frozen=True, slots=True)
class ModelArgument:
    """A MODEL of the command line: its served name and its checkpoint."""

    name: str
    checkpoint: str

    @classmethod
    def parse(cls, text: str) -> ModelArgument:
        """Parse `NAME=CHECKPOINT` or `CHECKPOINT`, whose name is the last part of its path. Raises `OptionError`."""
        name, separator, checkpoint = text.partition("=")
        if not separator:
            name, checkpoint = Path(text).resolve().name if Path(text).exists() else text.split("/")[-1], text
            name = name.removesuffix(".gguf")
        if not name or not checkpoint:
            raise OptionError(f"model '{text}': expected CHECKPOINT or NAME=CHECKPOINT")
        return cls(name, checkpoint)


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """All options of `neso serve`. Disabled front ends are None.

    `engine`: options of the engines of `models`, as parameters of the `llm` backend. `warnings`: about given options
    without effect.
    """

    server: ServerOptions
    models: tuple[ModelArgument, ...]
    engine: dict[str, str]
    http: HttpOptions | None
    grpc: GrpcOptions | None
    metrics: MetricsOptions | None
    openai: OpenAIOptions | None
    log: LogOptions
    warnings: tuple[str, ...] = ()

    @classmethod
    def read(cls, command_line: Mapping[str, list[str]]) -> ServeOptions:
        """Parse the texts given for each flag. Raises `OptionError`."""
        values = FlagValues.read(FLAGS, command_line)
        try:
            options = cls._from_values(values)
        except ServerError as error:
            raise OptionError(error.message) from None
        options._check_ports()
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
        names = values["models"] or ([] if values["model-repository"] else [SHIPPED_MODEL])
        grpc = values.build(GrpcOptions) if values["allow-grpc"] else None
        _warn_unencrypted_grpc(values, grpc)
        if openai is not None and openai.access.keys is not None:
            _warn_unrestricted_kserve(values)
        return cls(
            server=server,
            models=_models(names, values["served-model-name"]),
            engine=_engine_options(values),
            http=values.build(HttpOptions) if values["allow-http"] else None,
            grpc=grpc,
            metrics=values.build(MetricsOptions) if values["allow-metrics"] else None,
            openai=openai,
            log=values.build(LogOptions),
            warnings=tuple(values.warnings),
        )

    def _check_ports(self) -> None:
        """Raises `OptionError` if two front ends have the same address and port."""
        used: dict[tuple[str, int], str] = {}
        for name, options in (
            ("HTTP", self.http),
            ("gRPC", self.grpc),
            ("metrics", self.metrics),
            ("OpenAI", self.openai),
        ):
            if options is None or options.port == 0:
                continue
            address = (options.host, options.port)
            if address in used:
                raise OptionError(
                    f"the server cannot listen to {used[address]} requests and {name} requests at the same "
                    f"address and port {options.host}:{options.port}"
                )
            used[address] = name


def _models(texts: list[str], served_name: str | None) -> tuple[ModelArgument, ...]:
    models = tuple(ModelArgument.parse(text) for text in texts)
    if served_name is None:
        return models
    if len(models) != 1:
        raise OptionError("--served-model-name is the name of one MODEL; of several, give each as NAME=MODEL")
    return (ModelArgument.parse(f"{served_name}={models[0].checkpoint}"),)


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


def _engine_options(values: FlagValues) -> dict[str, str]:
    """Parameters of the `llm` backend. Raises `OptionError` if one is set by two flags."""
    options: dict[str, str] = {}
    for flag, name, value in _engine_settings(values):
        if name in options:
            raise OptionError(f"{flag.option}: '{name}' is given twice")
        options[name] = value
    return options


def _engine_settings(values: FlagValues) -> Iterator[tuple[Flag, str, str]]:
    """Yields flag, engine option and value."""
    for flag in ENGINE_FLAGS:
        if values.given(flag.name):
            yield flag, flag.name.replace("-", "_"), _to_text(values[flag.name])
    if values["lora-modules"]:
        yield _LORA_MODULES, "lora_modules", json.dumps(_lora_modules(values["lora-modules"]))
    names = {"method": "speculative", "model": "speculative_model"}
    for key, value in (values["speculative-config"] or {}).items():
        yield _SPECULATIVE, names.get(key, key), _to_text(value)
    for text in values["engine-config"]:
        yield (_ENGINE_CONFIG, *_pair(_ENGINE_CONFIG, text))


def _lora_modules(texts: list[str]) -> dict[str, str]:
    """Directories of adapters by name."""
    adapters: dict[str, str] = {}
    for text in texts:
        name, path = _pair(_LORA_MODULES, text)
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

"""Flags of `neso serve`, by topic.

Most flags are declared on the options that they set. This module selects the engine options that have a flag, and
declares the flags of the command itself and tritonserver flags that have no effect.
"""

from __future__ import annotations

from neso.engine.config import engine_options
from neso.flags import (
    BOOLEAN,
    JSON_OBJECT,
    PATH,
    SWITCH,
    TEXT,
    Flag,
    Kind,
    choice,
    completed,
    flags_of,
    integer,
    number,
)
from neso.frontends.cloud_options import SageMakerOptions, VertexAiOptions
from neso.frontends.frontend_options import ConnectionOptions, GrpcOptions, HttpOptions, MetricsOptions
from neso.frontends.openai_options import OpenAIOptions
from neso.server.cache_options import CacheConfig
from neso.server.options import LogOptions, ServerOptions

_ENGINE_OPTIONS = {option.name: option for option in engine_options()}


def _engine_flag(
    name: str, kind: Kind = TEXT, *, help: str = "", default_text: str = "", metavar: str = ""
) -> Flag:
    """Return the flag of an engine option, with its type, default and help text except those given.

    The name of the flag has dashes instead of underscores.
    """
    option = _ENGINE_OPTIONS[name]
    flag = Flag(name.replace("_", "-"), help or option.help, kind, default_text=default_text, metavar=metavar)
    return completed(flag, option.type, option.default or None)


ENGINE_FLAGS = (
    _engine_flag("runner"),
    _engine_flag("dtype"),
    _engine_flag("quantization", default_text="none"),
    _engine_flag("attention_backend"),
    _engine_flag("num_threads", integer(1)),
    _engine_flag("thread_binding"),
    _engine_flag("tensor_parallel_size", integer(1)),
    _engine_flag("pipeline_parallel_size", integer(1)),
    _engine_flag("rank_address", metavar="HOST:PORT"),
    _engine_flag("data_parallel_size", integer(1)),
    _engine_flag("workers", integer(0)),
    _engine_flag("prefill_workers", integer(0)),
    _engine_flag("decode_workers", integer(0)),
    _engine_flag("min_remote_prefill", integer(0)),
    _engine_flag("worker_address", metavar="ADDRESS"),
    _engine_flag("worker_token_file", metavar="PATH"),
    _engine_flag("cpus", metavar="LIST", default_text="all, or disjoint sets for several engines"),
    _engine_flag("device_ids", metavar="LIST"),
    _engine_flag("max_model_len", integer(1)),
    _engine_flag("max_num_seqs", integer(1), default_text="64; 256 or 1024 on a GPU"),
    _engine_flag("max_num_batched_tokens", integer(1), default_text="1024; 2048, 8192 or 16384 on a GPU"),
    _engine_flag("kv_cache_memory", integer(1), default_text="at most a quarter of the free memory"),
    _engine_flag("generation_config", metavar="auto|vllm|PATH"),
    _engine_flag("override_generation_config"),
    _engine_flag("enable_lora", SWITCH, help="Enable LoRA adapters; --lora-modules enables them too."),
    _engine_flag("max_loras", integer(1)),
    _engine_flag("max_lora_rank", integer(1)),
)
"""Engine options with their own flag. `--engine-config` sets the others."""
LORA_MODULES = Flag("lora-modules", "LoRA adapter to load at start.", repeated=True, metavar="NAME=PATH")
SPECULATIVE_CONFIG = Flag(
    "speculative-config",
    'Speculative decoding: {"method": "ngram", "num_speculative_tokens": 4}; "model" is the draft model.',
    JSON_OBJECT,
)
ENGINE_CONFIG = Flag(
    "engine-config", "Any engine option, by its name in model.json.", repeated=True, metavar="KEY=VALUE"
)

_ONE_LOOP = "one event loop handles all connections"
_NO_REQUEST_POOLS = "requests and responses are not pooled"
_NO_MEMORY_POOLS = "the server has no memory pools, engines manage their own"

COMMAND_FLAGS: dict[str, tuple[Flag, ...]] = {
    "Models": (
        Flag("served-model-name", "Name of the MODEL; the same as NAME=MODEL.", metavar="NAME"),
        Flag(
            "repoagent-directory",
            "Directory of tritonserver's repository agents.",
            PATH,
            ignored="repository agents are part of the package",
        ),
    ),
    "Engine (for models named on the command line)": (
        *ENGINE_FLAGS,
        LORA_MODULES,
        SPECULATIVE_CONFIG,
        ENGINE_CONFIG,
    ),
    "Ranks (one model over several processes)": (
        Flag(
            "rank-model",
            "Model that runs on the ranks started by mpirun, srun or torchrun.",
            default_text="the MODEL, or tensorrt_llm of a repository",
            metavar="NAME",
        ),
        Flag(
            "multi-model",
            "Start the ranks of all models from this server, on disjoint CPUs; ignore those of a launcher.",
            SWITCH,
        ),
    ),
    "Stages (models of a repository on workers)": (),
    "Connections": (),
    "HTTP": (
        Flag("allow-http", "Enable the HTTP frontend.", BOOLEAN, True),
        Flag(
            "http-thread-count",
            "Number of tritonserver's HTTP threads.",
            integer(1),
            ignored=_ONE_LOOP,
        ),
    ),
    "gRPC": (
        Flag("allow-grpc", "Enable the gRPC frontend.", BOOLEAN, True),
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
            "Backend of Triton's OpenAI frontend.",
            choice("vllm", "tensorrtllm"),
            ignored="requests follow the inputs that a model declares",
        ),
        Flag(
            "enable-kserve-frontends",
            "Serve the KServe protocols beside Triton's OpenAI frontend.",
            SWITCH,
            ignored="they are served unless --allow-http and --allow-grpc are false",
        ),
        Flag("uvicorn-log-level", "Log level of Triton's OpenAI frontend.", ignored="see --log-verbose"),
    ),
    "OpenAI access": (),
    "Metrics": (Flag("allow-metrics", "Enable the metrics frontend.", BOOLEAN, True),),
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
    "Limits": (),
    "Cloud endpoints": (
        Flag("allow-sagemaker", "Serve the endpoints of a SageMaker container.", BOOLEAN, False),
        Flag(
            "allow-vertex-ai",
            "Serve the endpoints of a Vertex AI container.",
            BOOLEAN,
            default_text="true if AIP_MODE is PREDICTION, else false",
        ),
        Flag(
            "sagemaker-thread-count",
            "Number of threads of the SageMaker endpoints.",
            integer(1),
            ignored=_ONE_LOOP,
        ),
        Flag(
            "vertex-ai-thread-count",
            "Number of threads of the Vertex AI endpoints.",
            integer(1),
            ignored=_ONE_LOOP,
        ),
    ),
}
"""Flags that no options class declares, by topic, in the order of the help."""


def _topics() -> dict[str, tuple[Flag, ...]]:
    """Return all flags by topic."""
    declared = [
        *flags_of(ServerOptions, "Models"),
        *flags_of(CacheConfig.parse, "Response cache"),
        *flags_of(ConnectionOptions, "Connections"),
        *flags_of(HttpOptions, "HTTP"),
        *flags_of(GrpcOptions, "gRPC"),
        *flags_of(OpenAIOptions, "OpenAI"),
        *flags_of(MetricsOptions, "Metrics"),
        *flags_of(SageMakerOptions, "Cloud endpoints"),
        *flags_of(VertexAiOptions, "Cloud endpoints"),
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

"""Options of an engine.

Each option is a field with its type, default and help text (`Meta.description`), of `EngineConfig` or of one of its
parts. `engine_options` lists them for the command line, the parameters of models, and the documentation. The module is
imported by `neso serve --help`, so it and its parts must be fast to import.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, NamedTuple, get_args

import msgspec
from msgspec import Meta

from neso.engine.cluster_config import ClusterConfig
from neso.engine.core.scheduler_config import SchedulerOptions
from neso.engine.kv_transfer.config import KvTransferConfig
from neso.engine.lora.config import LoraConfig
from neso.engine.runners.runner_options import AttentionBackendName, DType, Quantization, RunnerOptions
from neso.engine.sampling.score_limits import ScoreLimits
from neso.engine.spec_decode.config import SpeculationConfig
from neso.engine.thread_placement import ThreadBinding

_ALIASES = {"enable_kv_cache_reuse": "enable_prefix_caching"}
"""TensorRT-LLM's names of options."""


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Options of one engine. Options of its parts, such as `scheduler`, are set by flat names.

    The size of the KV cache is computed from several options: see `num_cache_blocks`.
    """

    model: Annotated[str, Meta(description="Checkpoint directory or GGUF file.")]
    tokenizer: Annotated[
        str | None, Meta(description="Directory or GGUF file of the tokenizer; the model's by default.")
    ] = None
    skip_tokenizer_init: Annotated[
        bool, Meta(description="Load no tokenizer: token ids in, token ids out.")
    ] = False
    runner: Annotated[
        str, Meta(description="Runner that executes the model; auto selects the fastest available.")
    ] = "auto"
    dtype: Annotated[
        DType,
        Meta(
            description="Type of weights and activations; auto is the checkpoint's: float32, float16, bfloat16."
        ),
    ] = "auto"
    quantization: Annotated[
        Quantization | None,
        Meta(description="Quantize dense weights while loading: int8, int4, int8_dynamic, fp8."),
    ] = None
    num_threads: Annotated[
        int | None,
        Meta(description="Threads of a CPU runner; by default the physical cores within the CPU quota."),
    ] = None
    thread_binding: Annotated[
        ThreadBinding,
        Meta(
            description="Bind native threads to: core, node, none; auto: node if there are several NUMA nodes."
        ),
    ] = "auto"
    tensor_parallel_size: Annotated[
        int, Meta(description="Number of ranks (processes) that each layer is split among.")
    ] = 1
    pipeline_parallel_size: Annotated[
        int, Meta(description="Number of groups of ranks that the layers are distributed to.")
    ] = 1
    rank_address: Annotated[
        str | None,
        Meta(
            description="HOST:PORT or socket path for ranks started by mpirun or srun; else the engine starts them."
        ),
    ] = None
    rank_start_timeout: Annotated[
        float, Meta(description="Seconds in which all ranks must have started and loaded their weights.")
    ] = 600.0
    data_parallel_size: Annotated[
        int | None,
        Meta(description="Number of engines that serve the model; without it, the count of instance_group."),
    ] = None
    cpus: Annotated[
        str | None,
        Meta(description='CPUs of the engine, such as 0-7,16; several engines: "0-7;8-15".'),
    ] = None
    device_ids: Annotated[
        str | None,
        Meta(
            description='GPUs of the engine among the visible ones, such as 0,1; several engines: "0,1;2,3".'
        ),
    ] = None
    max_model_len: Annotated[
        int | None, Meta(description="Maximum number of prompt and output tokens; the model's by default.")
    ] = None
    max_attention_window_size: Annotated[
        int | list[int] | None, Meta(description="Sliding-window size, for all layers or for each.")
    ] = None
    sink_token_length: Annotated[
        int, Meta(description="Number of first tokens that stay visible outside the sliding window.")
    ] = 0
    attention_backend: Annotated[
        AttentionBackendName,
        Meta(description="Attention kernels on a GPU: auto, triton, flashinfer, flash_attn."),
    ] = "auto"
    max_cuda_graph_batch: Annotated[
        int, Meta(description="Sequences of the largest decode step run as a CUDA graph; 0 for none.")
    ] = 1024
    kv_cache_memory: Annotated[int | None, Meta(description="Size of the KV cache in bytes.")] = None
    kv_cache_free_gpu_mem_fraction: Annotated[
        float | None, Meta(description="Size of the KV cache as a fraction of the free memory.")
    ] = None
    max_tokens_in_paged_kv_cache: Annotated[
        int | None, Meta(description="Maximum size of the KV cache in tokens.")
    ] = None
    num_blocks: Annotated[
        int | None, Meta(description="Size of the KV cache in blocks; overrides the other limits.")
    ] = None
    max_image_pixels: Annotated[
        int, Meta(description="Maximum number of pixels of an image of a prompt, before and after resizing.")
    ] = 1 << 26
    max_image_tokens: Annotated[
        int, Meta(description="Maximum number of tokens of an image of a prompt; larger images shrink.")
    ] = 4096
    classifier_from_token: Annotated[
        str | None, Meta(description="Classify texts by the next token: 'no,yes' is Qwen3-Reranker's.")
    ] = None
    grammar_timeout: Annotated[
        float, Meta(description="Seconds that the grammar of a request can take to compile.")
    ] = 10.0
    prepare_grammars: Annotated[
        bool, Meta(description="Prepare guided decoding with the model, not with the first grammar.")
    ] = False
    kv_cache_host_memory_bytes: Annotated[
        int, Meta(description="Host memory for cached blocks evicted from the device, in bytes.")
    ] = 0
    step_timeout: Annotated[
        float, Meta(description="Seconds after which a step counts as hung; 0 disables the watchdog.")
    ] = 600.0
    heartbeat_timeout: Annotated[
        float,
        Meta(description="Seconds without a heartbeat after which the engine is restarted; 0 disables it."),
    ] = 30.0
    max_restarts: Annotated[
        int,
        Meta(description="Failures of the engine in restart_window that are followed by a restart."),
    ] = 10
    restart_window: Annotated[float, Meta(description="Seconds for which max_restarts counts failures.")] = (
        300.0
    )
    record_steps: Annotated[
        str | None, Meta(description="Directory for a recording of all steps; disables overlap.")
    ] = None
    generation_config: Annotated[
        str, Meta(description="Source of sampling defaults: auto (checkpoint), vllm (none), or a directory.")
    ] = "auto"
    override_generation_config: Annotated[
        dict[str, Any],
        Meta(description='Sampling defaults that override those of the file: {"temperature": 0.5}.'),
    ] = {}
    logits_processors: Annotated[
        dict[str, str],
        Meta(description="Logits processors by name: FILE.py:ATTRIBUTE, MODULE:ATTRIBUTE or entry point."),
    ] = {}
    scheduler: SchedulerOptions = SchedulerOptions()
    lora: LoraConfig = LoraConfig()
    scores: ScoreLimits = ScoreLimits()
    speculation: SpeculationConfig = SpeculationConfig()
    cluster: ClusterConfig = ClusterConfig()
    transfer: KvTransferConfig = KvTransferConfig()

    def __post_init__(self) -> None:
        if self.data_parallel_size is not None and self.data_parallel_size < 1:
            raise ValueError(f"data_parallel_size must be at least 1, got {self.data_parallel_size}")
        for name in (
            "max_cuda_graph_batch",
            "step_timeout",
            "heartbeat_timeout",
            "max_restarts",
            "restart_window",
        ):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must be at least 0, got {getattr(self, name)}")
        for name in ("tensor_parallel_size", "pipeline_parallel_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not self.rank_start_timeout > 0:
            raise ValueError(f"rank_start_timeout must be above 0, got {self.rank_start_timeout}")
        if self.rank_address is not None and self.num_ranks == 1:
            raise ValueError("rank_address needs tensor_parallel_size or pipeline_parallel_size above 1")

    @property
    def num_ranks(self) -> int:
        """Number of processes that execute the model."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def tokenizer_path(self) -> str:
        return self.tokenizer or self.model

    @property
    def image_limits(self) -> tuple[int, int]:
        """Maximum number of pixels and of tokens of an image."""
        return self.max_image_pixels, self.max_image_tokens

    @property
    def runner_options(self) -> RunnerOptions:
        return RunnerOptions(
            self.dtype,
            self.quantization,
            self.num_threads,
            self.thread_binding,
            self.max_attention_window_size,
            self.sink_token_length,
            self.attention_backend,
            self.scheduler.block_size,
            self.max_cuda_graph_batch,
            lora_slots=self.lora.max_loras if self.lora.enabled else 0,
            max_lora_rank=self.lora.largest_rank if self.lora.enabled else 0,
        )

    @classmethod
    def option_names(cls) -> frozenset[str]:
        """Return the names accepted by `from_options`."""
        return frozenset({*(option.name for option in engine_options()), *_ALIASES})

    @classmethod
    def from_options(cls, model: str, options: Mapping[str, object]) -> EngineConfig:
        """Create a configuration from flat options (model parameters, keyword arguments).

        Values can be strings, and objects JSON. Raises `ValueError` for an unknown name or an invalid value.
        """
        options = {_ALIASES.get(name, name): value for name, value in options.items()}
        known = {option.name: option for option in engine_options()}
        unknown = sorted(options.keys() - known.keys())
        if unknown:
            raise ValueError(f"unknown engine option '{unknown[0]}', known are {', '.join(known)}")
        values: dict[str, dict[str, Any]] = {part: {} for part in ("", *_PARTS)}
        for name, value in options.items():
            values[known[name].part][name] = _convert(known[name], value)
        parts = {part: struct(**values[part]) for part, struct in _PARTS.items()}
        return cls(model=model, **parts, **values[""])  # type: ignore[arg-type]


_PARTS: dict[str, type[msgspec.Struct]] = {
    "scheduler": SchedulerOptions,
    "speculation": SpeculationConfig,
    "lora": LoraConfig,
    "scores": ScoreLimits,
    "cluster": ClusterConfig,
    "transfer": KvTransferConfig,
}
"""Fields of `EngineConfig` whose fields are options."""


class EngineOption(NamedTuple):
    """An option. `part`: the field of `EngineConfig` that contains it; "" for `EngineConfig` itself."""

    name: str
    type: Any
    default: Any
    help: str
    part: str = ""


def engine_options() -> list[EngineOption]:
    """Return all options except `model`."""
    own = [field for field in msgspec.structs.fields(EngineConfig) if field.name not in ("model", *_PARTS)]
    fields = [("", field) for field in own]
    fields += [(part, field) for part, struct in _PARTS.items() for field in msgspec.structs.fields(struct)]
    options = []
    for part, field in fields:
        kind, meta = get_args(field.type)
        has_factory = field.default is msgspec.NODEFAULT
        default = field.default_factory() if has_factory else field.default
        options.append(EngineOption(field.name, kind, default, meta.description, part))
    return options


def _convert(option: EngineOption, value: object) -> Any:
    try:
        if isinstance(value, str) and value.startswith(("{", "[")):
            value = msgspec.json.decode(value)
        return msgspec.convert(value, option.type, strict=False)
    except msgspec.DecodeError as error:
        raise ValueError(f"engine option '{option.name}': {error}") from None

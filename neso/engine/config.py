"""Settings of an engine."""

from __future__ import annotations

from typing import Any

import msgspec

from neso.engine.core.scheduler_config import SchedulerConfig
from neso.engine.lora.config import LoraConfig
from neso.engine.runners.base import DType, Quantization, RunnerOptions
from neso.engine.sampling.limits import ScoreLimits
from neso.engine.spec_decode.config import SpeculationConfig

_OTHER_NAMES = {"enable_kv_cache_reuse": "enable_prefix_caching"}
"""TensorRT-LLM's names of options that have another one here."""


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How to run one model.

    `model` is a checkpoint directory or a GGUF file, `tokenizer` another one whose tokenizer is taken.
    `skip_tokenizer_init`: there is none, token ids go in and come out.
    `max_model_len` None takes the model's own limit.
    `max_attention_window_size` and `sink_token_length` narrow what tokens see: see `limit_attention`.
    `kv_cache_memory` is in bytes. How the size of the cache follows from it and the options beside it: see
    `num_cache_blocks`. Without any, it is what `max_num_seqs` sequences of full length need, at most a quarter of the
    free memory, on a GPU 85 % of its own.
    `grammar_timeout`: seconds that the grammar of a request may take to compile (guided decoding).
    `prepare_grammars`: load what that needs with the model, instead of with the first grammar.
    `kv_cache_host_memory_bytes`: for cached blocks that the device has no room for, see `HostCache`.
    `step_timeout`: seconds after which a step counts as hung, see `StepWatchdog`; 0: never. `record_steps`: a folder
    that gets every step, for `neso.engine.diagnostics.replay`; steps do not overlap then.
    `generation_config`: where defaults of sampling are from, "auto" for the checkpoint, "vllm" for nowhere, or a
    directory; `override_generation_config` are further ones that go before these. See `read_default_sampling`.
    `runner` "auto" is the fastest that this machine has; see `RunnerOptions` for dtype, quantization, num_threads.
    """

    model: str
    tokenizer: str | None = None
    skip_tokenizer_init: bool = False
    runner: str = "auto"
    dtype: DType = "auto"
    quantization: Quantization | None = None
    num_threads: int | None = None
    max_model_len: int | None = None
    max_attention_window_size: int | list[int] | None = None
    sink_token_length: int = 0
    kv_cache_memory: int | None = None
    kv_cache_free_gpu_mem_fraction: float | None = None
    max_tokens_in_paged_kv_cache: int | None = None
    num_blocks: int | None = None
    grammar_timeout: float = 10.0
    prepare_grammars: bool = False
    kv_cache_host_memory_bytes: int = 0
    step_timeout: float = 600.0
    record_steps: str | None = None
    generation_config: str = "auto"
    override_generation_config: dict[str, Any] = {}
    scheduler: SchedulerConfig = SchedulerConfig()
    lora: LoraConfig = LoraConfig()
    scores: ScoreLimits = ScoreLimits()
    speculation: SpeculationConfig = SpeculationConfig()

    def __post_init__(self) -> None:
        if not self.step_timeout >= 0:
            raise ValueError(f"step_timeout must be at least 0, got {self.step_timeout}")

    @property
    def tokenizer_path(self) -> str:
        return self.tokenizer or self.model

    @property
    def runner_options(self) -> RunnerOptions:
        return RunnerOptions(
            self.dtype,
            self.quantization,
            self.num_threads,
            self.max_attention_window_size,
            self.sink_token_length,
        )

    @classmethod
    def option_names(cls) -> frozenset[str]:
        """The names that `from_options` knows."""
        grouped = (name for group in _GROUPS.values() for name in _fields(group))
        return frozenset({*(_fields(cls).keys() - {"model", *_GROUPS}), *grouped, *_OTHER_NAMES})

    @classmethod
    def from_options(cls, model: str, options: dict[str, object]) -> EngineConfig:
        """Make from flat options (a model's `parameters`, keyword arguments); those of its parts go to them.

        Values may be strings, objects in JSON. Raises `ValueError` that names an unknown or bad option.
        """
        fields = {name: _fields(group) for name, group in _GROUPS.items()}
        own = {name: kind for name, kind in _fields(cls).items() if name != "model" and name not in _GROUPS}
        known = [*own, *(name for group in fields.values() for name in group)]
        options = {_OTHER_NAMES.get(name, name): value for name, value in options.items()}
        unknown = sorted(set(options) - set(known))
        if unknown:
            raise ValueError(f"unknown engine option '{unknown[0]}', known are {', '.join(known)}")
        made = {name: group(**_convert(fields[name], options)) for name, group in _GROUPS.items()}
        return cls(model=model, **made, **_convert(own, options))  # type: ignore[arg-type]


_GROUPS: dict[str, type[msgspec.Struct]] = {
    "scheduler": SchedulerConfig,
    "speculation": SpeculationConfig,
    "lora": LoraConfig,
    "scores": ScoreLimits,
}
"""Fields of `EngineConfig` whose own fields are options."""


def _fields(struct: type[msgspec.Struct]) -> dict[str, Any]:
    """The types of the fields, by name."""
    return {field.name: field.type for field in msgspec.structs.fields(struct)}


def _convert(kinds: dict[str, Any], options: dict[str, object]) -> dict[str, object]:
    values = {}
    for name in kinds.keys() & options.keys():
        value = options[name]
        try:
            if isinstance(value, str) and value.startswith(("{", "[")):
                value = msgspec.json.decode(value)
            values[name] = msgspec.convert(value, kinds[name], strict=False)
        except msgspec.DecodeError as error:
            raise ValueError(f"engine option '{name}': {error}") from None
    return values

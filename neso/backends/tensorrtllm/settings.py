"""Conversion of TensorRT-LLM's `parameters` to engine options and backend settings."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from neso.backends.option_files import resolve_generation_config, resolve_processors, resolve_relative
from neso.backends.tensorrtllm.parameters import BY_NAME, DECODING_MODES, is_unset
from neso.engine.config import EngineConfig
from neso.engine.core.scheduler_config import CPU_LIMITS, WHOLE_PROMPT
from neso.engine.runners.registry import has_nvidia_gpu
from neso.engine.spec_decode.medusa import has_medusa_heads
from neso.engine.weights.hub import ModelNotFound, resolve_model
from neso.engine.weights.source import CheckpointError
from neso.server.errors import InvalidArgument

_TOKENIZER_FILE = "tokenizer.json"
_ALTERNATIVES = {
    "redrafter": "for a draft model use the option speculative_model",
    "lookahead": "for n-gram speculation use the option speculative: ngram",
    "eagle": "for a draft model use the option speculative_model, for Medusa heads decoding_mode: medusa",
}


@dataclass(frozen=True, slots=True)
class Settings:
    """Parsed `parameters` of a model. `warnings`: messages about parameters without effect."""

    engine: EngineConfig
    max_beam_width: int = 1
    exclude_input_in_output: bool = False
    decoding_mode: str = "auto"
    lora_prefetch_dir: Path | None = None
    iteration_metrics: bool = True
    normalize_log_probs: bool = False
    participants: list[int] | None = None
    warnings: list[str] = field(default_factory=list)


def read_settings(config: Any, version_directory: Path, directory: Path) -> Settings:
    """Parse the `parameters` of a `ModelConfig`. Raises `InvalidArgument`.

    Names that are not TensorRT-LLM's set engine options (`EngineConfig`); unknown names cause a warning.
    """
    reader = _Reader(config, version_directory, directory)
    return reader.read()


class _Reader:
    def __init__(self, config: Any, version_directory: Path, directory: Path) -> None:
        self._config = config
        self._places = (version_directory, directory)
        self._options: dict[str, object] = {}
        self._values: dict[str, Any] = {}
        self._warnings: list[str] = []

    def read(self) -> Settings:
        known = EngineConfig.option_names()
        for name, value in self._config.parameters.items():
            if is_unset(value.string_value):
                continue
            if name in BY_NAME:
                self._read_parameter(name, value.string_value)
            elif name in known:
                self._options[name] = value.string_value
            else:
                self._warnings.append(f"parameter '{name}' is unknown and ignored")
        self._reject_unsupported()
        model = model_files(self._values.get("gpt_model_path"), *self._places)
        self._complete(model)
        try:
            engine = EngineConfig.from_options(str(model), self._options)
        except ValueError as error:
            raise InvalidArgument(str(error)) from None
        processors = resolve_processors(engine.logits_processors, *self._places)
        prefetch = self._values.get("lora_prefetch_dir")
        return Settings(
            replace(engine, logits_processors=processors),
            max_beam_width=self._values.get("max_beam_width", 1),
            exclude_input_in_output=self._values.get("exclude_input_in_output", False),
            decoding_mode=self._values.get("decoding_mode", "auto"),
            lora_prefetch_dir=None if prefetch is None else self._directory("lora_prefetch_dir", prefetch),
            iteration_metrics=self._values.get("iter_stats_max_iterations") != 0,
            normalize_log_probs=self._values.get("normalize_log_probs", False),
            participants=self._values.get("participant_ids"),
            warnings=self._warnings,
        )

    def _read_parameter(self, name: str, text: str) -> None:
        parameter = BY_NAME[name]
        try:
            value = parameter.parse(text)
        except ValueError as expected:
            raise self._wrong(name, text, str(expected)) from None
        if parameter.option:
            self._options[parameter.option] = value
        elif parameter.setting:
            self._values[name] = value
        elif not parameter.quiet:
            self._warnings.append(f"parameter '{name}' has no effect: {parameter.effect}")

    def _wrong(self, name: str, text: str, expected: str) -> InvalidArgument:
        return InvalidArgument(
            f"parameter '{name}' of model '{self._config.name}' is '{text}', expected {expected}"
        )

    def _reject_unsupported(self) -> None:
        mode = self._values.get("decoding_mode", "auto")
        if mode in _ALTERNATIVES:
            raise InvalidArgument(
                f"parameter 'decoding_mode' of model '{self._config.name}' is '{mode}', which is not supported: "
                f"{_ALTERNATIVES[mode]}"
            )
        if mode not in DECODING_MODES:
            raise self._wrong("decoding_mode", mode, f"one of {', '.join(DECODING_MODES)}")
        if "encoder_model_path" in self._values:
            raise InvalidArgument(
                f"parameter 'encoder_model_path' of model '{self._config.name}': encoder-decoder models are not "
                "supported, leave it empty"
            )
        nodes = self._values.get("num_nodes", 1)
        if nodes > 1:
            raise self._wrong("num_nodes", str(nodes), "1: leader mode runs a model on several nodes")

    def _complete(self, model: Path) -> None:
        """Set derived options, and TensorRT-LLM's defaults where they differ from the engine's."""
        options, values = self._options, self._values
        options.setdefault("batch_scheduler_policy", "guaranteed_no_evict")
        options.setdefault("enable_lora", "auto")
        self._detect_medusa(model)
        if values.get("decoding_mode") == "medusa":
            options.setdefault("speculative", "medusa")
        if "speculative_model" in options:
            options["speculative_model"] = str(
                self._model("speculative_model", str(options["speculative_model"]))
            )
        if "generation_config" in options:
            options["generation_config"] = resolve_generation_config(
                str(options["generation_config"]), *self._places
            )
        options |= {name: number for name, number in self._limits().items() if name not in options}
        self._host_cache()
        self._tokenizer(model)

    def _detect_medusa(self, model: Path) -> None:
        """Select `medusa` if the checkpoint has Medusa heads, as TensorRT-LLM does, with a warning."""
        mode = self._values.get("decoding_mode")
        chosen = {"speculative", "speculative_model"} & self._options.keys()
        if mode == "medusa" or chosen or not model.is_dir():
            return
        try:
            found = has_medusa_heads(model)
        except CheckpointError as error:
            raise InvalidArgument(f"gpt_model_path: {error}") from None
        if found:
            instead = "" if mode is None else f" instead of '{mode}'"
            self._values["decoding_mode"] = "medusa"
            self._warnings.append(f"decoding_mode is 'medusa'{instead}: the checkpoint has Medusa heads")

    def _limits(self) -> Mapping[str, int]:
        """Return the scheduler limits. Defaults allow `max_batch_size` sequences with one token each per step."""
        options = {name: self._number(name) for name in _LIMITS & self._options.keys()}
        widest = max(int(self._config.max_batch_size), self._values.get("max_beam_width", 1))
        limits = {}
        if widest > CPU_LIMITS.max_num_seqs:  # lower ones are within the default of every device
            # Each running sequence has a token in every step.
            limits["max_num_seqs"] = min(widest, options.get("max_num_batched_tokens", widest))
        if self._values.get("enable_chunked_context") is False:
            limits["max_prefill_chunk"] = WHOLE_PROMPT
        queue = self._config.dynamic_batching.default_queue_policy.max_queue_size
        return {**limits, "max_queue_size": queue} if queue else limits

    def _number(self, name: str) -> int:
        """Return an integer option. Raises `InvalidArgument`."""
        try:
            return int(str(self._options[name]))
        except ValueError:
            raise self._wrong(name, str(self._options[name]), "an integer") from None

    def _host_cache(self) -> None:
        size = self._values.get("kv_cache_host_memory_bytes", 0)
        if not size:
            return
        if "runner" in self._options or has_nvidia_gpu():
            self._options["kv_cache_host_memory_bytes"] = size
        else:
            self._warnings.append(
                "parameter 'kv_cache_host_memory_bytes' has no effect: without a GPU the whole cache is on the host"
            )

    def _tokenizer(self, model: Path) -> None:
        """Use `tokenizer_dir`, or the model's tokenizer, or no tokenizer: requests and responses are token ids."""
        named = self._values.get("tokenizer_dir")
        if named is not None:
            self._options["tokenizer"] = str(self._model("tokenizer_dir", named))
        elif model.is_dir() and not (model / _TOKENIZER_FILE).is_file():
            self._options.setdefault("skip_tokenizer_init", "tokenizer" not in self._options)

    def _model(self, name: str, path: str) -> Path:
        """Resolve a path or model name."""
        try:
            return resolve_model(resolve_relative(Path(path).expanduser(), *self._places) or path)
        except ModelNotFound as error:
            raise InvalidArgument(f"parameter '{name}' of model '{self._config.name}': {error}") from None

    def _directory(self, name: str, path: str) -> Path:
        found = resolve_relative(Path(path).expanduser(), *self._places)
        if found is None or not found.is_dir():
            raise self._wrong(name, path, "a directory")
        return found


_LIMITS = frozenset({"max_num_seqs", "max_num_batched_tokens"})


EXPECTED_MODEL = (
    "name a Hugging Face checkpoint, a GGUF file, or the directory that `neso build` makes of one"
)


def model_files(path: str | None, version_directory: Path, model_directory: Path) -> Path:
    """Resolve `gpt_model_path`; if unset, the model is in the version directory. Raises `InvalidArgument`.

    The path can be absolute, relative to the version or model directory, the name of a shipped model, or a Hugging Face
    name.
    """
    if path is None:
        found = version_directory
    else:
        found = resolve_relative(Path(path).expanduser(), version_directory, model_directory) or Path(path)
    _reject_trt_engine(found)
    try:
        resolved = resolve_model(found)
    except ModelNotFound as error:
        raise InvalidArgument(f"gpt_model_path: {error}") from None
    if resolved.is_dir() and not (resolved / "config.json").is_file():
        unset = "is not set, and " if path is None else ""
        raise InvalidArgument(
            f"gpt_model_path: {unset}{resolved} contains no model (no config.json); {EXPECTED_MODEL}"
        )
    return resolved


def _reject_trt_engine(directory: Path) -> None:
    """Raise `InvalidArgument` for TensorRT engines and for checkpoints converted for TensorRT-LLM."""
    if any(directory.glob("*.engine")):
        raise InvalidArgument(
            f"gpt_model_path: {directory} contains a TensorRT engine, which only TensorRT-LLM can run; {EXPECTED_MODEL}"
        )
    try:
        config = json.loads((directory / "config.json").read_bytes())
    except (OSError, ValueError):
        return
    if isinstance(config, dict) and ("pretrained_config" in config or "mapping" in config):
        raise InvalidArgument(
            f"gpt_model_path: {directory} contains a model that was converted for TensorRT-LLM; {EXPECTED_MODEL}"
        )

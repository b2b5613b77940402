"""Access to the vLLM library: names used by the backend, and differences between vLLM versions."""

from __future__ import annotations

import os

# Forking a process with threads can hang. Usage statistics require the user's consent.
os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

import contextlib
import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import psutil
import vllm
from vllm import AsyncEngineArgs, AsyncLLMEngine, PoolingParams, SamplingParams
from vllm.lora.request import LoRARequest

from neso.generation import InvalidParameter, SamplingDefaults
from neso.generation.sampling_params import AUTO, max_new_tokens_is_limit
from neso.server.errors import InvalidArgument

VERSION: str = vllm.__version__

_GONE = frozenset({"swap_space", "use_v2_block_manager", "num_scheduler_steps", "device", "worker_use_ray"})
"""Arguments of earlier versions that repositories still contain, but that have no effect."""

Record = Callable[[Any, Any, int], None]
"""Called after each step with vLLM's `SchedulerStats` and `IterationStats` (or None) and the engine's number."""


def engine_arguments(given: Mapping[str, Any]) -> tuple[Any, list[str]]:
    """Convert `model.json` to `AsyncEngineArgs`. Also returns the names of arguments without effect.

    Booleans and numbers can be strings. Raises `InvalidArgument`.
    """
    known = {field.name: field for field in dataclasses.fields(AsyncEngineArgs)}
    values: dict[str, Any] = {}
    ignored = []
    for name, value in given.items():
        if name in known:
            values[name] = _typed(name, value, _default(known[name]))
        elif name == "disable_log_requests":  # replaced by enable_log_requests
            values.setdefault("enable_log_requests", not _typed(name, value, False))
        elif name in _GONE:
            ignored.append(name)
        else:
            raise InvalidArgument(f"model.json: vLLM {VERSION} has no engine argument '{name}'")
    try:
        return AsyncEngineArgs(**values), ignored
    except (ValueError, TypeError, NotImplementedError, OSError) as error:
        raise InvalidArgument(f"model.json: {error}") from None


def _default(field: Any) -> Any:
    if field.default_factory is dataclasses.MISSING:
        return field.default
    return field.default_factory()


def _typed(name: str, value: Any, default: Any) -> Any:
    """Convert a value to the type of its default: a bool or number, or a config dataclass (a JSON object)."""
    try:
        if isinstance(value, dict) and dataclasses.is_dataclass(default):
            group: Any = type(default)
            return group(**value)
        if isinstance(value, str) and isinstance(default, (bool, int, float)):
            return msgspec.convert(value, type(default), strict=False)
    except (ValueError, TypeError) as error:
        raise InvalidArgument(f"model.json: {name}: {error}, got {value!r}") from None
    return value


def start_engine(arguments: Any, record: Record | None) -> Any:
    """Start an `AsyncLLMEngine` and load its model. Blocks for up to minutes. Raises vLLM's exceptions."""
    loggers = None if record is None else [_stat_logger(record)]
    return AsyncLLMEngine.from_engine_args(arguments, stat_loggers=loggers)


def kill_processes(engine: Any) -> None:
    """Kill the processes of this engine and their workers, also stopped ones; none if Ray started them."""
    for process in getattr(engine.engine_core.resources.engine_manager, "processes", ()):
        workers: list[psutil.Process] = []
        with contextlib.suppress(psutil.NoSuchProcess):
            workers = psutil.Process(process.pid).children(recursive=True)
        process.kill()
        for worker in workers:
            with contextlib.suppress(psutil.NoSuchProcess):
                worker.kill()


def _stat_logger(record: Record) -> type:
    from vllm.v1.metrics.loggers import StatLoggerBase

    class Recorder(StatLoggerBase):  # type: ignore[misc]  # vLLM may not be installed
        def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
            self._engine_index = engine_index

        def record(
            self, scheduler_stats: Any = None, iteration_stats: Any = None, *further: Any, **named: Any
        ) -> None:
            record(scheduler_stats, iteration_stats, self._engine_index)

        def log_engine_initialized(self) -> None:
            pass

    return Recorder


async def supported_tasks(engine: Any) -> frozenset[str]:
    """Return the tasks that the model supports, such as "generate" and "embed"."""
    return frozenset(await engine.get_supported_tasks())


async def tokenizer_of(engine: Any) -> Any:
    """Return the engine's tokenizer (transformers interface). In earlier versions it is returned by a coroutine."""
    found = engine.get_tokenizer()
    return await found if inspect.isawaitable(found) else found


async def prepared(engine: Any, prompt: dict[str, Any]) -> Any:
    """Preprocess a `TextPrompt` or `TokensPrompt` for `generate` and `encode`: tokenize text and process images.

    Does not block the event loop. Raises vLLM's errors about the prompt.
    """
    renderer = getattr(engine, "renderer", None)
    if renderer is None or not hasattr(renderer, "render_cmpl_async"):
        return prompt
    (rendered,) = await renderer.render_cmpl_async([prompt])
    return rendered


def about_images(error: BaseException) -> bool:
    """Return whether an error of `prepared` can be about the prompt's images.

    Some of these errors are assertions, e.g. if the prompt has no image placeholder.
    """
    return about_request(error) or isinstance(error, (AssertionError, RuntimeError))


def num_prompt_tokens(prepared: Any) -> int | None:
    """Return the number of tokens of a `prepared` prompt, including image tokens; None if not tokenized yet."""
    ids = prepared.get("prompt_token_ids") if isinstance(prepared, Mapping) else None
    return None if ids is None else len(ids)


def default_sampling(model_config: Any) -> SamplingDefaults:
    """Return the default sampling parameters used by vLLM's server. Blocks. Raises `InvalidArgument`."""
    values = dict(model_config.get_diff_sampling_param())
    values["max_new_tokens"] = values.pop("max_tokens", None)
    source, override = model_config.generation_config, model_config.override_generation_config or {}
    try:
        return SamplingDefaults.from_mapping(values, limits_tokens=max_new_tokens_is_limit(source, override))
    except InvalidParameter as error:
        place = "generation_config.json" if source == AUTO else source
        place = "override_generation_config" if error.field in override else place
        raise InvalidArgument(f"{place}: {error}") from None


def sampling_fields() -> dict[str, Any]:
    """Return the types of the sampling parameters that clients can set, by name."""
    return {
        field.name: field.type
        for field in msgspec.structs.fields(SamplingParams)
        if field.name not in _NOT_FOR_CLIENTS and not field.name.startswith("_")
    }


_NOT_FOR_CLIENTS = frozenset({"output_kind", "skip_clone", "output_text_buffer_length"})


def sampling_params(values: Mapping[str, Any], *, stream: bool) -> Any:
    """Create `SamplingParams`. Outputs are deltas if `stream` is true, otherwise one final output.

    `values["structured_outputs"]`: the fields of vLLM's type. Raises vLLM's errors and `TypeError`.
    """
    from vllm.sampling_params import RequestOutputKind

    values = dict(values)
    form = values.pop("structured_outputs", None) or values.pop("guided_decoding", None)
    if form is not None:
        name, kind = _structured_outputs()
        values[name] = kind(**form)
    kind = RequestOutputKind.DELTA if stream else RequestOutputKind.FINAL_ONLY
    return SamplingParams(**values, output_kind=kind)


def _structured_outputs() -> tuple[str, Any]:
    """Return name and type of the parameter for structured outputs; both were different before vLLM 0.11."""
    from vllm import sampling_params as module

    if hasattr(module, "StructuredOutputsParams"):
        return "structured_outputs", module.StructuredOutputsParams
    return "guided_decoding", module.GuidedDecodingParams


def structured_outputs_fields() -> frozenset[str]:
    """Return the fields of vLLM's structured outputs."""
    return frozenset(
        field.name for field in dataclasses.fields(_structured_outputs()[1]) if not field.name.startswith("_")
    )


def pooling_params(task: str, *, dimensions: int | None = None, activation: bool | None = None) -> Any:
    """Create `PoolingParams`. `activation` None: the model's default."""
    values: dict[str, Any] = {"task": task, "dimensions": dimensions}
    if activation is not None:
        known = {field.name for field in msgspec.structs.fields(PoolingParams)}
        values["use_activation" if "use_activation" in known else "activation"] = activation
    return PoolingParams(**values)


def lora_request(name: str, number: int, path: str) -> Any:
    """Create a `LoRARequest`. `number` must be unique for each adapter."""
    return LoRARequest(name, number, path)


def about_request(error: BaseException) -> bool:
    """Return whether an error of `generate` or `encode` is caused by the client's request."""
    kind = getattr(_exceptions(), "VLLMClientError", None)
    return isinstance(error, (ValueError, TypeError) if kind is None else (kind, ValueError, TypeError))


def about_dead_engine(error: BaseException) -> bool:
    """Return whether an error means that the engine has ended."""
    from vllm.v1.engine.exceptions import EngineDeadError

    return isinstance(error, EngineDeadError)


def about_full_queue(error: BaseException) -> bool:
    """Return whether an error means that the engine's queue is full (e.g. because of `max_num_queued_reqs`)."""
    kind = getattr(_exceptions(), "GracefulHTTPError", None)
    return kind is not None and isinstance(error, kind)


def _exceptions() -> Any:
    try:
        from vllm import exceptions
    except ImportError:
        return None
    return exceptions

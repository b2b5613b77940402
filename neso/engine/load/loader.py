"""Loads a checkpoint into an engine core."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from neso.engine.addons.registry import standard_addons
from neso.engine.config import EngineConfig
from neso.engine.core.scheduler_config import CPU_LIMITS
from neso.engine.diagnostics.replay import StepRecorder
from neso.engine.encoders.encoder_core import EncoderCore
from neso.engine.encoders.text_encoder import TextEncoder
from neso.engine.errors import EngineError
from neso.engine.guided.addon import GrammarSource, GuidedDecodingAddon
from neso.engine.ipc.messages import ONE_PROCESS, EngineInfo
from neso.engine.kv_transfer.addon import KvTransfer
from neso.engine.load.cache_size import (
    bytes_per_block,
    memory_report,
    num_cache_blocks,
    num_host_blocks,
    step_memory,
    step_size,
)
from neso.engine.load.transfers import check_transfers, start_transfers
from neso.engine.logits_processors.addon import LogitsProcessors
from neso.engine.logits_processors.processor import (
    LogitsProcessor,
    ProcessorContext,
    ProcessorError,
    load_processors,
)
from neso.engine.loop.engine_core import EngineCore
from neso.engine.lora.config import LoraConfig
from neso.engine.lora.startup import open_adapters
from neso.engine.pooling.decoder_classifier import classifier_of_tokens, read_head
from neso.engine.pooling.pooler import DecoderClassifier, Pooler
from neso.engine.pooling.sentence_transformers import max_tokens, read_pooler
from neso.engine.runners.base import CacheLayout, Runner
from neso.engine.runners.registry import layer_stack_class, open_model
from neso.engine.runners.runner_options import RunnerOptions
from neso.engine.spec_decode.loader import load_draft_runner, make_speculation
from neso.engine.specs.config_reader import UnsupportedModel
from neso.engine.specs.encoder_spec import EncoderSpec
from neso.engine.specs.registry import decoder_spec, encoder_spec, has_head
from neso.engine.specs.vision_spec import GridVisionSpec, VisionSpec, language_config, vision_spec
from neso.engine.vision.grid_tower import GridTower
from neso.engine.vision.image_encoder import ImageEncoder
from neso.engine.vision.image_processor import ImageLimits, VisionInfo, read_processor
from neso.engine.vision.square_tower import SquareTower
from neso.engine.weights.checkpoint import open_source
from neso.engine.weights.files import read_json_object
from neso.engine.weights.hub import ModelNotFound, resolve_model
from neso.engine.weights.source import CheckpointError, TensorSource
from neso.generation import InvalidParameter, SamplingDefaults
from neso.generation.pooling import PoolingInfo, PoolingTask
from neso.generation.sampling_params import (
    AUTO,
    DEFAULT_NAMES,
    NO_DEFAULTS,
    max_new_tokens_is_limit,
)

logger = logging.getLogger(__name__)

Core = EngineCore | EncoderCore
"""The core of a decoder or of an encoder."""

_ENCODER_ON_RANKS = (
    "embedding models run on one rank: set tensor_parallel_size and pipeline_parallel_size to 1"
)


class Ranks(Protocol):
    """The ranks of a model, as the loader of one of them sees them; see `RankSession`."""

    @property
    def runner_options(self) -> RunnerOptions:
        """The options of this rank's runner."""

    def join(self, runner: Runner) -> Runner:
        """Connect the runner to those of the other ranks. Raises `EngineError`."""


def load_engine(
    config: EngineConfig, processors: Mapping[str, Any] | None = None, ranks: Ranks | None = None
) -> tuple[Core, EngineInfo]:
    """Load the weights and allocate the KV cache. Raises `EngineError` with a message for the user.

    `processors`: logits processors in addition to those that `config` names. `ranks`: the other ranks, if this is
    rank 0 of several.
    """
    started = time.perf_counter()
    if config.num_ranks > 1 and ranks is None:
        raise EngineError(ONE_PROCESS)
    options = config.runner_options if ranks is None else ranks.runner_options
    try:
        pooler = read_pooler(Path(config.model), default="last")
        with open_source(config.model, options.layout) as source:
            spec = encoder_spec(source.config)
            if spec is not None:
                if ranks is not None:
                    raise EngineError(_ENCODER_ON_RANKS)
                if config.transfer.kv_transfer:
                    raise EngineError("kv_transfer: embedding models have no KV cache")
                return _load_encoder(config, spec, source, started)
            check_length = partial(_max_model_len, config)
            generates = has_head(source.config)
            default_sampling = read_default_sampling(config) if generates else SamplingDefaults()
            tower = vision_spec(source.config)
            text_config = language_config(source.config)
            runner = open_model(source, config.runner, options, check_length, text_config)
            images = None if tower is None else _load_images(config, tower, source, runner)
            pooler = replace(pooler, classifier=_load_classifier(config, text_config, source, runner))
    except (CheckpointError, UnsupportedModel, ValueError) as error:
        raise EngineError(str(error)) from None
    if ranks is not None:
        runner = ranks.join(runner)
    if config.transfer.kv_transfer:
        check_transfers(config, runner)
    max_model_len = _max_model_len(config, runner.max_position)
    draft_runner = load_draft_runner(config, runner)
    weights = runner.device_memory()
    scheduler = config.scheduler.resolve(runner.default_limits)
    size = step_size(scheduler, config.speculation.max_draft_tokens, max_model_len)
    needed = step_memory(size, runner, draft_runner, _blank_image(tower, images))
    num_blocks = num_cache_blocks(config, runner, size, needed, draft_runner)
    block_size = scheduler.block_size
    cache_bytes = num_blocks * bytes_per_block(block_size, runner, draft_runner)
    logger.info(memory_report(size, needed, weights, cache_bytes, runner.free_memory()))
    host_blocks = num_host_blocks(config, runner)
    guided = GuidedDecodingAddon(
        GrammarSource(config.tokenizer_path, runner.vocab_size, config.grammar_timeout)
    )
    layout = CacheLayout(num_blocks, block_size, max_num_seqs=scheduler.max_num_seqs)
    speculation = make_speculation(config, runner, draft_runner, layout)
    if config.prepare_grammars:
        guided.prepare_compiler()
    lora = open_adapters(config.lora, runner)
    logits_processors = _load_logits_processors(config, processors or {}, runner.vocab_size)
    kv_transfer = KvTransfer()
    addons = standard_addons(
        runner,
        pooler=pooler,
        images=images,
        lora=lora,
        guided=guided,
        speculation=speculation,
        processors=LogitsProcessors(logits_processors),
        kv_transfer=kv_transfer,
    )
    shares = config.transfer.kv_transfer
    try:
        core = EngineCore(runner, scheduler, num_blocks, addons, host_blocks, shares_cache=shares)
    except OSError as error:
        raise EngineError(
            f"kv_transfer: no shared memory for a cache of {num_blocks} blocks: {error}"
        ) from None
    kv_address, kv_format = start_transfers(config, core, kv_transfer) if shares else ("", None)
    if config.record_steps is not None:
        try:
            core.record = StepRecorder(Path(config.record_steps), config, num_blocks, host_blocks).record
        except OSError as error:
            raise EngineError(f"record_steps: {error}") from None
    info = EngineInfo(
        runner=type(runner).__name__,
        max_model_len=core.scheduler.kv.longest_sequence(max_model_len),
        max_num_seqs=scheduler.max_num_seqs,
        max_num_batched_tokens=scheduler.max_num_batched_tokens,
        vocab_size=runner.vocab_size,
        num_blocks=num_blocks,
        block_size=block_size,
        cache_bytes=cache_bytes,
        load_seconds=time.perf_counter() - started,
        capabilities=runner.capabilities,
        hidden_size=runner.hidden_size,
        enable_prefix_caching=scheduler.enable_prefix_caching,
        in_flight_batching=scheduler.in_flight_batching,
        lora=LoraConfig() if lora is None else config.lora,
        scores=config.scores,
        generates=generates,
        vision=None if tower is None else _vision_info(tower),
        pooling=_pooling_info(runner, pooler),
        num_speculative_tokens=config.speculation.num_places,
        default_sampling=default_sampling,
        logits_processors=tuple(logits_processors),
        kv_address=kv_address,
        kv_format=kv_format,
    )
    return core, info


def load_rank(config: EngineConfig, ranks: Ranks) -> Runner:
    """Load the weights of a rank other than 0. Raises `EngineError` with a message for the user.

    Everything else of the engine is on rank 0: sampling, grammars, draft models, Medusa heads, image encoders.
    """
    options = ranks.runner_options
    try:
        with open_source(config.model, options.layout) as source:
            if encoder_spec(source.config) is not None:
                raise EngineError(_ENCODER_ON_RANKS)
            check_length = partial(_max_model_len, config)
            text_config = language_config(source.config)
            return open_model(source, config.runner, options, check_length, text_config)
    except (CheckpointError, UnsupportedModel, ValueError) as error:
        raise EngineError(str(error)) from None


def _load_logits_processors(
    config: EngineConfig, processors: Mapping[str, Any], vocab_size: int
) -> dict[str, LogitsProcessor]:
    tokenizer = None if config.skip_tokenizer_init else config.tokenizer_path
    try:
        return load_processors(
            {**config.logits_processors, **processors}, ProcessorContext(vocab_size, tokenizer)
        )
    except ProcessorError as error:
        raise EngineError(str(error)) from error


def _load_encoder(
    config: EngineConfig, spec: EncoderSpec, source: TensorSource, started: float
) -> tuple[EncoderCore, EngineInfo]:
    directory = Path(config.model)
    longest = min(spec.max_position, max_tokens(directory) or spec.max_position)
    max_model_len = _max_model_len(config, longest)
    stack = layer_stack_class(config.runner)
    encoder = TextEncoder.load(spec, source, stack, config.runner_options)
    # Not more on a GPU: batches are padded for attention there, so their memory depends on the longest text.
    scheduler = config.scheduler.resolve(CPU_LIMITS)
    core = EncoderCore(encoder, read_pooler(directory, default="mean"), scheduler)
    info = EngineInfo(
        runner=stack.__name__,
        max_model_len=max_model_len,
        max_num_seqs=scheduler.max_num_seqs,
        max_num_batched_tokens=scheduler.max_num_batched_tokens,
        vocab_size=spec.vocab_size,
        num_blocks=0,
        block_size=scheduler.block_size,
        cache_bytes=0,
        load_seconds=time.perf_counter() - started,
        hidden_size=spec.hidden_size,
        generates=False,
        pooling=core.info,
    )
    return core, info


def _load_images(
    config: EngineConfig, spec: VisionSpec | GridVisionSpec, source: TensorSource, runner: Runner
) -> ImageEncoder:
    if "input_embeddings" not in runner.capabilities:
        raise UnsupportedModel(f"the runner {runner.name} takes token ids only, the model takes images")
    processor = read_processor(Path(config.model), _vision_info(spec), ImageLimits(*config.image_limits))
    if isinstance(spec, GridVisionSpec):
        return ImageEncoder(GridTower.load(spec, source, processor.normalization), spec.tile_edge)
    stack = layer_stack_class(config.runner)
    tower = SquareTower.load(spec, source, stack, config.runner_options, processor.normalization)
    return ImageEncoder(tower)


def _blank_image(
    spec: VisionSpec | GridVisionSpec | None, images: ImageEncoder | None
) -> Callable[[], object] | None:
    """Return the encoding of one tile, as many as are in memory at once; None if no runner encodes images."""
    if images is None or not isinstance(spec, VisionSpec):
        return None
    pixels = np.zeros((1, spec.tile_edge, spec.tile_edge, 3), np.uint8)
    return partial(images.encode, pixels)


def _load_classifier(
    config: EngineConfig, text_config: Mapping[str, Any], source: TensorSource, runner: Runner
) -> DecoderClassifier | None:
    if config.classifier_from_token is None:
        return read_head(source, runner.hidden_size)
    spec = decoder_spec(text_config)
    return classifier_of_tokens(config.classifier_from_token, spec, source, Path(config.tokenizer_path))


def _vision_info(spec: VisionSpec | GridVisionSpec) -> VisionInfo:
    return VisionInfo(spec.image_token_id, spec.layout, spec.tile_edge, spec.tokens_per_tile)


def _pooling_info(runner: Runner, pooler: Pooler) -> PoolingInfo | None:
    if "hidden_states" not in runner.capabilities:
        return None
    classifier = pooler.classifier
    tasks: frozenset[PoolingTask] = frozenset({"embed"} if classifier is None else {"embed", "classify"})
    labels = [] if classifier is None else list(classifier.labels)
    return PoolingInfo(
        tasks=tasks, dimensions=pooler.dimensions(runner.hidden_size), kind=pooler.kind, labels=labels
    )


def _max_model_len(config: EngineConfig, max_position: int) -> int:
    if config.max_model_len is None:
        return max_position
    if not 2 <= config.max_model_len <= max_position:
        raise EngineError(
            f"max_model_len {config.max_model_len} must be between 2 and the model's {max_position}"
        )
    return config.max_model_len


GENERATION_CONFIG = "generation_config.json"


def read_default_sampling(config: EngineConfig) -> SamplingDefaults:
    """Return the sampling defaults by vLLM's rules.

    `override_generation_config` overrides the file selected by `generation_config`. Raises `CheckpointError` with the
    file and the field.
    """
    override = config.override_generation_config
    unknown = sorted(override.keys() - set(DEFAULT_NAMES))
    if unknown:
        raise CheckpointError(
            f"override_generation_config: unknown parameter '{unknown[0]}', known are {', '.join(DEFAULT_NAMES)}"
        )
    file = _generation_config_file(config)
    said = {} if file is None else read_json_object(file)
    limits = max_new_tokens_is_limit(config.generation_config, override)
    try:
        return SamplingDefaults.from_mapping({**said, **override}, limits_tokens=limits)
    except InvalidParameter as error:
        place = "override_generation_config" if error.field in override else file
        raise CheckpointError(f"{place}: {error}") from None


def _generation_config_file(config: EngineConfig) -> Path | None:
    """Return the file selected by the options; None if there is none."""
    source, model = config.generation_config, Path(config.model)
    if source == NO_DEFAULTS:
        return None
    if source == AUTO:
        file = model / GENERATION_CONFIG  # a GGUF file has no such file
        return file if file.is_file() else None
    given = Path(source).expanduser()
    if given.is_file():
        return given
    try:
        file = (
            given if given.is_dir() else resolve_model(source, patterns=(GENERATION_CONFIG,))
        ) / GENERATION_CONFIG
    except ModelNotFound as error:
        raise CheckpointError(f"generation_config: {error}") from None
    if not file.is_file():
        raise CheckpointError(f"generation_config: {file}: there is no such file")
    return file

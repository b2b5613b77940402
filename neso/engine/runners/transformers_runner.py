"""Runs models without a spec: the transformers implementation of a model, with Neso's paged attention in its layers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM

from neso.engine.core.step_plan import StepPlan
from neso.engine.runners.runner_options import DEFAULT_OPTIONS, RunnerOptions, UnsupportedOption
from neso.engine.runners.torch.attention import AttentionNeeds, check_attention
from neso.engine.runners.torch.device_runner import DeviceRunner, operations_for, prepare_device
from neso.engine.runners.torch.kv_cache import HeadShape, KVCache
from neso.engine.runners.torch.operations import Operations
from neso.engine.runners.torch.step_inputs import StepInputs, step_inputs
from neso.engine.specs.config_reader import UnsupportedModel
from neso.engine.weights.checkpoint import Checkpoint
from neso.engine.weights.source import CheckpointError, TensorSource

logger = logging.getLogger(__name__)

ATTENTION_NAME = "neso_paged"
"""Value of `attn_implementation`; transformers creates no mask for it."""


class LayerAttention(Protocol):
    def __call__(
        self,
        layer: int,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        window: int | None,
        scale: float,
        cap: float,
    ) -> Tensor:
        """Compute queries[T, heads, D], keys[T, kv_heads, D], values[T, kv_heads, E] -> [T, heads, E]."""


_active: ContextVar[LayerAttention] = ContextVar("attention of the step that runs")


@contextmanager
def use_attention(attention: LayerAttention) -> Iterator[None]:
    """Route attention of transformers models to `attention` within this context."""
    token = _active.set(attention)
    try:
        yield
    finally:
        _active.reset(token)


def _forward_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Compute query[1, heads, T, D], key and value [1, kv_heads, T, D] of a flat batch -> [1, T, heads, D]."""
    for name in ("s_aux", "position_bias"):
        if options.get(name) is not None:
            raise UnsupportedModel(f"attention with {name} is not supported for models run by transformers")
    if not getattr(module, "is_causal", True) or attention_mask is not None:
        raise UnsupportedModel("only causal attention is supported for models run by transformers")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    query, key, value = (states[0].transpose(0, 1) for states in (query, key, value))
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    attended = _active.get()(layer, query, key, value, sliding_window, scale, softcap or 0.0)
    return attended[None], None


AttentionInterface.register(ATTENTION_NAME, _forward_attention)


class PagedAttention:
    """Attention over the KV cache in one step."""

    def __init__(self, inputs: StepInputs, cache: KVCache, operations: Operations) -> None:
        self._inputs, self._cache, self._operations = inputs, cache, operations

    def __call__(
        self,
        layer: int,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        window: int | None,
        scale: float,
        cap: float,
    ) -> Tensor:
        cache = self._cache.layers[layer]
        self._operations.store(keys.contiguous(), values.contiguous(), self._inputs.slots, cache)
        return self._operations.attention(queries.contiguous(), cache, self._inputs, window, scale, cap)


class HeadProbe:
    """Records the head shapes and windows of each layer for one token: config.json has no common field for them."""

    def __init__(self) -> None:
        self.shapes: dict[int, HeadShape] = {}
        self.windows: set[int | None] = set()

    def __call__(
        self,
        layer: int,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        window: int | None,
        scale: float,
        cap: float,
    ) -> Tensor:
        if layer in self.shapes:
            raise UnsupportedModel(f"layer {layer} attends more than once, which is not supported")
        self.shapes[layer] = HeadShape(keys.shape[1], keys.shape[2], values.shape[2])
        self.windows.add(window)
        return torch.zeros(*queries.shape[:2], values.shape[2], dtype=values.dtype, device=values.device)


# Not supported, because frequencies would depend on the longest sequence of the batch.
_BATCH_DEPENDENT_ROPE = ("dynamic", "longrope")
_KNOWN_LAYERS = ("full_attention", "sliding_attention")


class TransformersRunner(DeviceRunner):
    """Supports models whose only state per sequence is keys and values."""

    def __init__(self, model: nn.Module, config: Any, device: torch.device, operations: Operations) -> None:
        self._model, self.device = model, device
        self._operations = operations
        self.vocab_size = int(config.vocab_size)
        self.max_position = int(config.max_position_embeddings)
        self.dtype = next(model.parameters()).dtype
        self.heads = self._probe(int(config.num_hidden_layers), getattr(config, "sliding_window", None))

    @classmethod
    def open(
        cls,
        source: TensorSource,
        options: RunnerOptions = DEFAULT_OPTIONS,
        check_length: Callable[[int], object] = lambda length: None,
    ) -> TransformersRunner:
        """Load a model. `check_length`: see `open_model`.

        Raises `UnsupportedModel`, `UnsupportedOption`, `CheckpointError`.
        """
        if options.quantization is not None:
            raise UnsupportedOption("models run by transformers cannot be quantized here")
        if options.max_attention_window_size is not None or options.sink_token_length:
            raise UnsupportedOption(
                "models run by transformers use their own attention windows; max_attention_window_size and "
                "sink_token_length are not supported"
            )
        if not isinstance(source, Checkpoint):
            raise UnsupportedModel(
                f"{source.directory}: only Hugging Face checkpoints can be run by transformers"
            )
        device = prepare_device(options)
        operations = operations_for(device, options)
        try:
            config = AutoConfig.from_pretrained(source.directory, local_files_only=True).get_text_config()
            check_config(config)
            check_length(config.max_position_embeddings)
            model = AutoModelForCausalLM.from_pretrained(
                source.directory,
                dtype="auto" if options.dtype == "auto" else getattr(torch, options.dtype),
                attn_implementation=ATTENTION_NAME,
                local_files_only=True,
            )
        except UnsupportedModel:
            raise
        except KeyError as error:
            if error.args == (ATTENTION_NAME,):
                raise UnsupportedModel(
                    f"{config.model_type}: its implementation in transformers has attention classes of its own instead "
                    "of the attention interface, which paged attention needs"
                ) from None
            raise CheckpointError(f"{source.directory}: transformers cannot load it: {error}") from error
        except (OSError, ValueError) as error:
            # Further lines of these messages are hints on installing other versions.
            reason = str(error).partition("\n")[0]
            raise CheckpointError(f"{source.directory}: transformers cannot load it: {reason}") from error
        logger.info("transformers runner: %s, %s", type(model).__name__, device)
        runner = cls(model.eval().to(device), config, device, operations)
        check_attention(operations.attention, AttentionNeeds(runner.heads, runner.dtype, options.block_size))
        return runner

    def forward(self, plan: StepPlan, cache: KVCache, chosen: Tensor | None) -> Tensor:
        inputs = step_inputs(plan, cache.layout.block_size, self.device, chosen)
        with use_attention(PagedAttention(inputs, cache, self._operations)):
            output = self._model(
                input_ids=inputs.token_ids[None].long(),
                position_ids=inputs.positions[None].long(),
                use_cache=False,
                # 0 means all rows.
                logits_to_keep=0 if inputs.logits_rows is None else inputs.logits_rows.long(),
            )
        logits: Tensor = output.logits[0]
        return logits.float()

    @torch.inference_mode()
    def _probe(self, num_layers: int, window: int | None) -> list[HeadShape]:
        """Return the head shapes of each layer. `window`: the config's sliding window.

        Raises `UnsupportedModel` if layers have state other than keys and values, or if the window is applied by the
        attention mask only, which paged attention does not get.
        """
        probe, one = HeadProbe(), torch.ones(1, 1, dtype=torch.long, device=self.device)
        with use_attention(probe):
            self._model(input_ids=one, position_ids=one, use_cache=False)
        if sorted(probe.shapes) != list(range(num_layers)):
            raise UnsupportedModel(
                f"{type(self._model).__name__}: {len(probe.shapes)} of {num_layers} layers attend by transformers' "
                "attention interface; all must"
            )
        if window is not None and window < self.max_position and probe.windows == {None}:
            raise UnsupportedModel(
                f"{type(self._model).__name__}: the sliding window of {window} tokens is part of the attention mask in "
                "transformers, which is not supported for models run by transformers"
            )
        return [probe.shapes[layer] for layer in range(num_layers)]


def check_config(config: Any) -> None:
    """Raises `UnsupportedModel` for configs that would silently produce wrong results in a flat batch."""
    name = config.model_type
    if getattr(config, "max_position_embeddings", None) is None:
        raise UnsupportedModel(f"{name}: config field 'max_position_embeddings' is missing")
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = [part.get("rope_type") for part in (rope, *rope.values()) if isinstance(part, dict)]
    for kind in set(kinds) & set(_BATCH_DEPENDENT_ROPE):
        raise UnsupportedModel(
            f"{name}: rotary scaling {kind!r} is not supported for models run by transformers"
        )
    for kind in set(getattr(config, "layer_types", None) or ()) - set(_KNOWN_LAYERS):
        raise UnsupportedModel(
            f"{name}: layers of type {kind!r} are not supported for models run by transformers"
        )
    if getattr(config, "attention_chunk_size", None) or getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModel(f"{name}: only causal attention is supported for models run by transformers")

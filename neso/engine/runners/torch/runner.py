"""The torch runner: a spec on a GPU, or on the CPU with torch's own operations."""

from __future__ import annotations

import logging

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from neso.engine.core.step_plan import StepPlan
from neso.engine.runners.base import DEFAULT_OPTIONS, CacheLayout, Logits, Runner, RunnerOptions
from neso.engine.runners.reference.rotary import RotaryTable
from neso.engine.runners.torch.decode_graphs import DecodeGraphs
from neso.engine.runners.torch.decoder import Decoder
from neso.engine.runners.torch.device import default_device
from neso.engine.runners.torch.device_logits import DeviceLogits
from neso.engine.runners.torch.kv_cache import HeadShape, KVCache, bytes_per_block
from neso.engine.runners.torch.operations import Operations, PlainOperations
from neso.engine.runners.torch.sampling import choose
from neso.engine.runners.torch.step_inputs import copy_together, step_inputs
from neso.engine.runners.torch.weights import WeightLoader
from neso.engine.sampling.random_choice import Draws
from neso.engine.specs.decoder_spec import DecoderSpec
from neso.engine.weights.source import WeightSource

logger = logging.getLogger(__name__)


class TorchRunner(Runner):
    """Holds the weights, the cache and the captured graphs. The steps must come one at a time."""

    def __init__(self, spec: DecoderSpec, decoder: Decoder, device: torch.device) -> None:
        self.spec = spec
        self._decoder = decoder
        self._device = device
        self._heads = [HeadShape(spec.num_kv_heads, spec.head_dim, spec.head_dim)] * spec.num_layers
        self._cache: KVCache | None = None
        self._graphs: DecodeGraphs | None = None

    @classmethod
    def load(
        cls, spec: DecoderSpec, source: WeightSource, options: RunnerOptions = DEFAULT_OPTIONS
    ) -> TorchRunner:
        device = default_device()
        if device.type == "cpu" and options.num_threads:
            torch.set_num_threads(options.num_threads)
        weights = WeightLoader(spec, source, options, device).load()
        logger.info("torch runner: %s, %s", device, weights.dtype)
        return cls(spec, Decoder(spec, weights, _operations(device), _cos_sin(spec, device)), device)

    def allocate_cache(self, layout: CacheLayout) -> None:
        dtype = self._decoder.weights.dtype
        cache = KVCache(self._heads, layout, dtype, self._device)
        self._cache = cache
        if self._device.type == "cuda":
            self._graphs = DecodeGraphs(
                lambda inputs: self._decoder.forward(inputs, cache),
                layout.block_size,
                cache.padding_block,
                min(-(-self.spec.max_position // layout.block_size), layout.num_blocks),
                self._device,
            )

    def cache_bytes_per_block(self, block_size: int) -> int:
        return bytes_per_block(self._heads, block_size, self._decoder.weights.dtype)

    @torch.inference_mode()
    def step(self, plan: StepPlan) -> Logits:
        if self._cache is None:
            raise RuntimeError("allocate_cache must come before the first step")
        if len(plan.block_copies):
            self._cache.copy_blocks(copy_together([plan.block_copies], self._device)[0])
        if self._graphs is not None and self._graphs.fits(plan):
            return DeviceLogits(self._graphs.run(plan))
        inputs = step_inputs(plan, self._cache.layout.block_size, self._device)
        return DeviceLogits(self._decoder.forward(inputs, self._cache))

    @torch.inference_mode()
    def choose(self, logits: Logits, draws: Draws) -> npt.NDArray[np.int32]:
        assert isinstance(logits, DeviceLogits)
        tokens: npt.NDArray[np.int32] = choose(logits.values[: len(draws)], draws).cpu().numpy()
        return tokens


def _operations(device: torch.device) -> Operations:
    if device.type != "cuda":
        return PlainOperations()
    from neso.engine.runners.torch.kernels.operations import TritonOperations

    return TritonOperations()


def _cos_sin(spec: DecoderSpec, device: torch.device) -> Tensor:
    cos, sin = RotaryTable(spec.rotary).lookup(np.arange(spec.max_position, dtype=np.int32))
    return torch.from_numpy(np.concatenate([cos[:, 0], sin[:, 0]], axis=1)).to(device)

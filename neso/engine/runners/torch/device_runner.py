"""Base class of torch runners: device, KV cache, block copies, and logits and sampling on the device."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from neso.engine.core.scheduler_config import StepLimits, gpu_limits
from neso.engine.core.step_plan import StepPlan
from neso.engine.host_resources import available_cores
from neso.engine.runners.base import CacheLayout, Capability, Logits, Runner
from neso.engine.runners.runner_options import RunnerOptions
from neso.engine.runners.step_memory import StepMemory, StepSize, StepTooLarge
from neso.engine.runners.torch.attention import open_attention
from neso.engine.runners.torch.device_memory import CudaMemory, DeviceMemory
from neso.engine.runners.torch.kv_cache import HeadShape, KVCache, bytes_per_block
from neso.engine.runners.torch.linears import multiplies_float8
from neso.engine.runners.torch.operations import Operations, PlainOperations
from neso.engine.runners.torch.ranks import device_of_rank
from neso.engine.runners.torch.sampling import apply_adjustments, choose, sample_and_score
from neso.engine.runners.torch.step_inputs import send_together
from neso.engine.sampling.adjustments import LogitAdjustments
from neso.engine.sampling.token_sampling import SamplingBatch
from neso.engine.sampling.token_scores import ScoreRequest, TokenScores
from neso.engine.spec_decode.draft import DraftTreePlan

Float32Array = npt.NDArray[np.float32]


def prepare_device(options: RunnerOptions) -> torch.device:
    """Return the current CUDA device, or that of the rank; without one the CPU.

    The CPU uses the configured threads, or at most `available_cores`.
    """
    if torch.cuda.is_available() and options.layout.size > 1:
        return device_of_rank(options.layout)
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    torch.set_num_threads(options.num_threads or min(torch.get_num_threads(), available_cores()))
    return torch.device("cpu")


def use_device(device: torch.device) -> None:
    """Make a GPU the current one of this thread, on which Triton launches kernels."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def operations_for(device: torch.device, options: RunnerOptions) -> Operations:
    """Return Triton kernels on a GPU, with the attention of the options; plain torch operations elsewhere.

    Raises the errors of `open_attention`.
    """
    attention = open_attention(device, options)
    if attention is None:
        return PlainOperations()
    from neso.engine.runners.torch.triton_operations import TritonOperations

    return TritonOperations(attention, multiplies_float8(device))


def is_lost(device: torch.device) -> bool:
    """Whether the CUDA context is corrupted, for example by an illegal address: then every later call fails too."""
    if device.type != "cuda":
        return False
    try:
        torch.cuda.synchronize(device)
    except RuntimeError:  # torch.AcceleratorError
        return True
    return False


class DeviceLogits:
    """`RemoteLogits` float32[R, vocab_size]. Indexing copies rows to the host."""

    def __init__(self, values: Tensor) -> None:
        self.values = values

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, rows: int | slice | list[int]) -> Float32Array:
        """Return a copy of the rows."""
        picked: Float32Array = self.values[rows].cpu().numpy()
        return picked.copy() if self.values.device.type == "cpu" else picked

    @torch.inference_mode()
    def __setitem__(self, row: int, logits: Float32Array) -> None:
        self.values[row] = torch.from_numpy(logits).to(self.values.device)

    @torch.inference_mode()
    def adjust(self, adjustments: LogitAdjustments) -> None:
        apply_adjustments(self.values, adjustments)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> npt.NDArray[Any]:
        return np.asarray(self[:], dtype)


_SHARE_OF_GPU = 0.9
"""Fraction of the free memory beside `step_memory` that the KV cache gets. The rest is for fragments of the allocator,
log probabilities and other processes."""


class DeviceRunner(Runner):
    """Base class; subclasses implement `forward`. Not thread-safe.

    - heads: shape of the keys and values of each layer
    - dtype: of activations and KV cache
    """

    device: torch.device
    heads: list[HeadShape]
    dtype: torch.dtype
    can_overlap = True
    capabilities: frozenset[Capability] = frozenset({"host_cache"})
    _cache: KVCache | None = None
    # Tokens sampled by the last launched step, which the next step reads before they are copied to the host.
    _chosen: Tensor | None = None

    @abstractmethod
    def forward(self, plan: StepPlan, cache: KVCache, chosen: Tensor | None) -> Tensor:
        """Return logits float32[R, vocab_size] on the device; writes new keys and values.

        Block copies are already done. A token id -1 - r means chosen[r]; see `step_inputs`.
        """

    def allocate_cache(self, layout: CacheLayout) -> None:
        use_device(self.device)
        self._cache = KVCache(self.heads, layout, self.dtype, self.device)

    def cache_bytes_per_block(self, block_size: int) -> int:
        return bytes_per_block(self.heads, block_size, self.dtype)

    @property
    def default_limits(self) -> StepLimits:
        if self.device.type != "cuda":
            return super().default_limits
        properties = torch.cuda.get_device_properties(self.device)
        return gpu_limits(properties.name, properties.total_memory)

    @property
    def share_of_free_memory(self) -> float:
        return _SHARE_OF_GPU if self.device.type == "cuda" else super().share_of_free_memory

    def free_memory(self) -> int:
        if self.device.type != "cuda":
            return super().free_memory()
        # Memory that the allocator keeps, for example that of graphs that were captured only to measure them.
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info(self.device)
        return int(free)

    @property
    def shares_memory(self) -> bool:
        return self.device.type != "cuda"

    def step_memory(self, size: StepSize, encode_image: Callable[[], object] | None = None) -> StepMemory:
        if self.device.type != "cuda":
            return super().step_memory(size, encode_image)
        return self.measure_step(size, CudaMemory(self.device), encode_image)

    @torch.inference_mode()
    def measure_step(
        self, size: StepSize, memory: DeviceMemory, encode_image: Callable[[], object] | None = None
    ) -> StepMemory:
        """Run a step of this size on a cache of one block; see `Runner.step_memory`."""
        use_device(self.device)
        plan, draws = self.largest_plan(size), size.draws()
        try:
            layout = CacheLayout(1, size.block_size, max_num_seqs=size.num_sequences)
            cache = KVCache(self.heads, layout, self.dtype, self.device)
            # First without measuring: kernels are compiled, and libraries allocate memory that they keep.
            choose(self.forward(plan, cache, None), draws)
            memory.begin()
            choose(self.forward(plan, cache, None), draws)
            peak = memory.peak()
            if encode_image is not None:
                encode_image()
                memory.begin()
                encode_image()
                peak = max(peak, memory.peak())
            return StepMemory(peak, self.measure_graphs(size, cache, memory), measured=True)
        except torch.OutOfMemoryError as error:
            raise StepTooLarge(str(error).partition("\n")[0]) from None

    def largest_plan(self, size: StepSize) -> StepPlan:
        """Return the step that `measure_step` runs."""
        return size.plan()

    def measure_graphs(self, size: StepSize, cache: KVCache, memory: DeviceMemory) -> int:
        """Return the bytes that CUDA graphs take."""
        return 0

    def device_memory(self) -> int:
        return torch.cuda.memory_allocated(self.device) if self.device.type == "cuda" else 0

    def has_lost_device(self) -> bool:
        return is_lost(self.device)

    def step(self, plan: StepPlan) -> Logits:
        return DeviceLogits(self._logits(plan))

    @torch.inference_mode()
    def choose(self, logits: Logits, draws: SamplingBatch) -> npt.NDArray[np.int32]:
        assert isinstance(logits, DeviceLogits)
        tokens: npt.NDArray[np.int32] = choose(logits.values[: len(draws)], draws).cpu().numpy()
        return tokens

    def launch(self, plan: StepPlan) -> LaunchedDeviceLogits:
        return LaunchedDeviceLogits(self._logits(plan), self._keep_chosen)

    def _keep_chosen(self, tokens: Tensor) -> None:
        self._chosen = tokens

    @torch.inference_mode()
    def _logits(self, plan: StepPlan) -> Tensor:
        use_device(self.device)
        if self._cache is None:
            raise RuntimeError("allocate_cache must come before the first step")
        if len(plan.block_transfers):
            self._cache.transfer(plan.block_transfers)
        if len(plan.block_copies):
            self._cache.copy_blocks(send_together([plan.block_copies], self.device)[0])
        tree = plan.part(DraftTreePlan)
        if tree is not None and len(tree.slot_copies):
            slots = tree.copied_slots(plan, self._cache.layout.block_size)
            self._cache.copy_slots(*send_together(list(slots), self.device))
        return self.forward(plan, self._cache, self._chosen)


class LaunchedDeviceLogits:
    """Logits float32[R, vocab_size] that the device may still be computing; `keep_chosen` gets the sampled tokens."""

    def __init__(self, values: Tensor, keep_chosen: Callable[[Tensor], None]) -> None:
        self._values, self._keep_chosen = values, keep_chosen

    @torch.inference_mode()
    def sample(
        self,
        draws: SamplingBatch,
        adjustments: LogitAdjustments | None = None,
        wanted: ScoreRequest | None = None,
    ) -> DeviceTokens:
        tokens, scores = sample_and_score(self._values[: len(draws)], draws, adjustments, wanted)
        self._keep_chosen(tokens)
        return DeviceTokens([tokens, *scores])


class DeviceTokens:
    """Sampled tokens int32[R], and the fields of `TokenScores` if requested, that are being copied to the host."""

    def __init__(self, results: list[Tensor]) -> None:
        self._done: torch.cuda.Event | None = None
        self._results = results
        if results[0].device.type == "cuda":
            self._results = [
                torch.empty_like(result, device="cpu", pin_memory=True).copy_(result, non_blocking=True)
                for result in results
            ]
            self._done = torch.cuda.Event()
            self._done.record()

    def wait(self) -> npt.NDArray[np.int32]:
        if self._done is not None:
            self._done.synchronize()
        tokens: npt.NDArray[np.int32] = self._results[0].numpy()
        return tokens

    def scores(self) -> TokenScores | None:
        results = self._results[1:]
        return TokenScores(*(result.numpy() for result in results)) if results else None

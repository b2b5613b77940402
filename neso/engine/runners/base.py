"""Interfaces of runners, which execute the model in an engine step, and of encoder layer stacks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, Protocol

import numpy as np
import numpy.typing as npt

from neso.engine.core.attention_window import AttentionWindow
from neso.engine.core.scheduler_config import CPU_LIMITS, StepLimits
from neso.engine.host_resources import available_memory
from neso.engine.runners.runner_options import DEFAULT_OPTIONS, RunnerOptions
from neso.engine.runners.shared_cache import CacheFormat, SharedCache
from neso.engine.runners.step_memory import StepMemory, StepSize, activations_memory, logits_memory
from neso.engine.sampling.token_sampling import SamplingBatch, choose

if TYPE_CHECKING:
    from neso.engine.core.step_plan import StepPlan
    from neso.engine.lora.adapter import LoraAdapter
    from neso.engine.parallel.communicator import Communicator
    from neso.engine.sampling.adjustments import LogitAdjustments
    from neso.engine.sampling.token_scores import ScoreRequest, TokenScores
    from neso.engine.specs.decoder_spec import DecoderSpec
    from neso.engine.specs.encoder_spec import LayerStackSpec
    from neso.engine.weights.model_tensors import EncoderTensors
    from neso.engine.weights.source import TensorSource

Capability = Literal[
    "lora",
    "input_embeddings",
    "tree_attention",
    "hidden_states",
    "attention_sinks",
    "attention_backends",
    "host_cache",
    "ranks",
    "shared_cache",
    "thread_binding",
]
"""Optional features of a runner:

- lora: several adapters in a batch (`LoraPlan`)
- input_embeddings: embedding rows instead of token ids (`EmbeddingPlan`)
- tree_attention: draft tokens that form a tree (`DraftTreePlan`)
- hidden_states: final hidden states besides logits (`PoolingPlan`)
- attention_sinks: first tokens that stay visible in sliding-window layers
- attention_backends: attention of other libraries (`RunnerOptions.attention_backend`)
- host_cache: KV cache blocks offloaded to host memory
- ranks: tensor and pipeline parallelism (`RunnerOptions.layout`)
- shared_cache: blocks that other processes can map (`CacheLayout.shared`)
- thread_binding: threads bound to cores or NUMA nodes (`RunnerOptions.thread_binding`)
"""

Float32Array = npt.NDArray[np.float32]
Int32Array = npt.NDArray[np.int32]


class RemoteLogits(Protocol):
    """Logits float32[R, vocab_size] on a device. Indexing copies rows to the host."""

    def __len__(self) -> int: ...

    def __getitem__(self, rows: int | slice | list[int]) -> Float32Array: ...

    def __setitem__(self, row: int, logits: Float32Array) -> None: ...

    def adjust(self, adjustments: LogitAdjustments) -> None:
        """Apply penalties, biases and bans in place."""


Logits = Float32Array | RemoteLogits
"""Rows of logits. To change a row, read it, change it and write it back."""


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """Paged KV cache: `num_blocks` blocks of `block_size` tokens, in each layer.

    - num_host_blocks: additional blocks in host memory, for runners with "host_cache"
    - shared: other processes can map blocks (`Runner.shared_cache`), for runners with "shared_cache"
    - max_num_seqs: maximum number of sequences in a step; the torch runner captures CUDA graphs up to it
    """

    num_blocks: int
    block_size: int
    num_host_blocks: int = 0
    shared: bool = False
    max_num_seqs: int = 256


class LaunchedTokens(Protocol):
    """Sampled tokens of a step that may still be running."""

    def wait(self) -> npt.NDArray[np.int32]:
        """Return one token per draw, int32[R]; INVALID_TOKEN for NaN logits. Raises the step's error if it failed."""

    def scores(self) -> TokenScores | None:
        """Return the requested scores, after `wait`; None if none were requested."""


class LaunchedLogits(Protocol):
    """Logits of a step that may still be running."""

    def sample(
        self,
        draws: SamplingBatch,
        adjustments: LogitAdjustments | None = None,
        wanted: ScoreRequest | None = None,
    ) -> LaunchedTokens:
        """Start to sample a token for each of the first len(draws) rows, like `token_scores.sample_and_score`.

        Called at most once, before the next step is launched.
        """


class PackedAdapter(Protocol):
    """A LoRA adapter in a runner's format, in host memory."""

    @property
    def num_bytes(self) -> int: ...


class Runner(ABC):
    """Executes a model, one whole step per call. The only state per sequence is in its KV cache blocks.

    - vocab_size: width of the logits
    - max_position: maximum sequence length in tokens
    - hidden_size: width of embeddings and hidden states; 0 if not needed
    """

    vocab_size: int
    max_position: int
    hidden_size: int = 0
    can_overlap: ClassVar[bool] = False
    """Whether `launch` returns before the step has finished."""
    capabilities: frozenset[Capability] = frozenset()
    """Optional features; requests that need other features are rejected at admission."""
    window: AttentionWindow | None = None
    """Largest attention window of any layer; None for full attention. Blocks outside the window are freed."""
    shared_cache: SharedCache | None = None
    """The KV cache, or a copy of its blocks in host memory, if it was allocated as a shared one."""
    cache_format: CacheFormat | None = None
    """Format of the blocks, for runners with "shared_cache"."""

    @property
    def name(self) -> str:
        """The name in messages."""
        return type(self).__name__

    @abstractmethod
    def allocate_cache(self, layout: CacheLayout) -> None:
        """Allocate the KV cache. Called once, before the first step."""

    def has_lost_device(self) -> bool:
        """Whether no further step can run in this process. Called after a step has failed."""
        return False

    def store_shared(self, blocks: list[int]) -> None:  # noqa: B027
        """Copy computed blocks to `shared_cache`; nothing to do if it is the cache itself."""

    def load_shared(self, blocks: list[int]) -> None:  # noqa: B027
        """Copy blocks from `shared_cache`; nothing to do if it is the cache itself."""

    @abstractmethod
    def cache_bytes_per_block(self, block_size: int) -> int:
        """Return the size in bytes of one KV cache block in all layers."""

    @property
    def default_limits(self) -> StepLimits:
        """Limits of a step that the options do not set."""
        return CPU_LIMITS

    @property
    def share_of_free_memory(self) -> float:
        """Default fraction of the free memory that is used for the KV cache."""
        return 0.25

    def free_memory(self) -> int:
        """Return the bytes available for the KV cache: host memory within the limits of the cgroup."""
        return available_memory()

    @property
    def shares_memory(self) -> bool:
        """Whether `free_memory` is that of the host, which all ranks on it share."""
        return True

    def step_memory(self, size: StepSize, encode_image: Callable[[], object] | None = None) -> StepMemory:
        """Return the memory that a step of this size needs besides weights and KV cache.

        Called before `allocate_cache`. `encode_image`: runs the vision encoder of the model. On a GPU, both are run
        and measured, and memory that stays in use reduces `free_memory`. Raises `StepTooLarge` if they cannot run.
        """
        return StepMemory(logits_memory(size, self.vocab_size))

    def device_memory(self) -> int:
        """Return the bytes allocated on a device other than the host."""
        return 0

    @abstractmethod
    def step(self, plan: StepPlan) -> Logits:
        """Compute the new tokens, write their keys and values, and return logits float32[R, vocab_size].

        Row i belongs to plan.logits_rows[i]. The caller may change rows until the next step.
        """

    def hidden_states(self) -> Float32Array:
        """Return the final hidden states of the last step, float32[H, hidden_size].

        Row i belongs to `PoolingPlan.rows[i]`. For runners with "hidden_states". The caller may change rows until the
        next step.
        """
        raise NotImplementedError

    def choose(self, logits: Logits, draws: SamplingBatch) -> npt.NDArray[np.int32]:
        """Sample a token for each of the first len(draws) rows of `step`'s logits, like `token_sampling.choose`.

        Returns INVALID_TOKEN for rows with NaN logits. Runners override this with faster implementations.
        """
        return choose(logits[: len(draws)], draws)

    def keep_row_states(self) -> None:
        """Make `row_states` available after each step. Called before the first step, with "hidden_states" only."""
        raise NotImplementedError

    def row_states(self, rows: list[int]) -> Float32Array:
        """Return the final hidden states of logits rows of the last step, float32[len(rows), hidden_size].

        Cheaper than `hidden_states`, because these rows are computed for their logits anyway.
        """
        raise NotImplementedError

    def launch(self, plan: StepPlan) -> LaunchedLogits:
        """Start a step, for runners with `can_overlap`.

        A token id -1 - r in the plan means the token sampled for row r of the previously launched step.
        """
        raise NotImplementedError


class SpecRunner(Runner):
    """Executes any model described by a `DecoderSpec`, or the shard of it that belongs to one rank.

    On several ranks, every rank runs the same steps; only rank 0 gets logits, the others arrays without rows.
    """

    def __init__(self, spec: DecoderSpec) -> None:
        self.spec = spec
        self.vocab_size, self.max_position = spec.vocab_size, spec.max_position
        self.window = spec.widest_window
        self.hidden_size = spec.hidden_size

    @classmethod
    @abstractmethod
    def load(
        cls, spec: DecoderSpec, source: TensorSource, options: RunnerOptions = DEFAULT_OPTIONS
    ) -> SpecRunner:
        """Load the weights of the whole model, or of the shard of the rank `options.layout`.

        Raises `CheckpointError` if a tensor is missing or has the wrong shape, `UnsupportedOption` for an
        unsupported option.
        """

    def connect(self, communicator: Communicator) -> None:
        """Set the connection to the other ranks, for runners with "ranks".

        Called after all ranks have loaded their weights, and before `allocate_cache`.
        """
        raise NotImplementedError

    def step_memory(self, size: StepSize, encode_image: Callable[[], object] | None = None) -> StepMemory:
        return StepMemory(logits_memory(size, self.vocab_size) + activations_memory(size, self.spec))

    def pack_adapter(self, adapter: LoraAdapter) -> PackedAdapter:
        """Convert an adapter to the runner's format, for runners with "lora". Thread-safe."""
        raise NotImplementedError

    def set_adapter(self, slot: int, adapter: PackedAdapter | None) -> None:
        """Set or remove the adapter of a slot (`LoraPlan.slots`) from the next step on."""
        raise NotImplementedError


class LayerStack(ABC):
    """Executes the layers of a `LayerStackSpec`; stateless between calls.

    `binds_threads`: whether it supports `RunnerOptions.thread_binding`.
    """

    binds_threads: ClassVar[bool] = False
    spec: LayerStackSpec

    @classmethod
    @abstractmethod
    def load(
        cls, spec: LayerStackSpec, tensors: EncoderTensors, options: RunnerOptions = DEFAULT_OPTIONS
    ) -> LayerStack:
        """Load the weights. Raises `CheckpointError` for a missing tensor, `UnsupportedOption`."""

    def has_lost_device(self) -> bool:
        """Whether no further batch can run in this process. Called after `run` has failed."""
        return False

    @abstractmethod
    def run(self, x: Float32Array, starts: Int32Array) -> Float32Array:
        """Return the output of the last layer for x float32[T, hidden], a flat batch without padding. May overwrite x.

        starts int32[S + 1]: sequence s has the tokens starts[s]:starts[s + 1], at least one.
        """


def positions_in_sequences(starts: Int32Array) -> Int32Array:
    """Return the position int32[T] of each token in its sequence, for a flat batch with `starts` int32[S + 1]."""
    return np.arange(starts[-1], dtype=np.int32) - np.repeat(starts[:-1], np.diff(starts))

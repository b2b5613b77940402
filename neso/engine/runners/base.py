"""The contract of a runner: what executes the model's part of an engine step."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, Protocol

import numpy as np
import numpy.typing as npt

from neso.engine.core.attention_window import AttentionWindow
from neso.engine.sampling.token_sampling import SamplingBatch, choose

if TYPE_CHECKING:
    from neso.engine.core.step_plan import StepPlan
    from neso.engine.lora.adapter import LoraAdapter
    from neso.engine.specs.decoder_spec import DecoderSpec
    from neso.engine.weights.source import WeightSource

DType = Literal["auto", "float32", "float16", "bfloat16"]
Quantization = Literal["int8", "int4", "int8_dynamic", "fp8"]
Capability = Literal[
    "lora", "input_embeddings", "tree_attention", "hidden_states", "attention_sinks", "host_cache"
]
"""What not every runner can do: adapters in a batch; rows that come in place of embedded tokens; drafts as trees;
the final hidden states beside the logits; first tokens that stay in sight of a sliding window; a second tier of the
cache in the host's memory."""

Float32Array = npt.NDArray[np.float32]


class RemoteLogits(Protocol):
    """float32[R, vocab_size] on a device: what is indexed is copied to the host."""

    def __len__(self) -> int: ...

    def __getitem__(self, rows: int | slice | list[int]) -> Float32Array: ...

    def __setitem__(self, row: int, logits: Float32Array) -> None: ...


Logits = Float32Array | RemoteLogits
"""Rows of logits. To change one, read it, change it and write it back."""


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """Shape of the paged key-value cache: `num_blocks` blocks of `block_size` tokens, shared by all layers.

    `num_host_blocks` in the host's memory beside them, for runners with "host_cache".
    """

    num_blocks: int
    block_size: int
    num_host_blocks: int = 0


@dataclass(frozen=True, slots=True)
class RunnerOptions:
    """How a runner keeps the weights and what it may use of the machine.

    - dtype: of weights and activations; "auto" is that of the checkpoint
    - quantization: of matrices that the checkpoint has dense; None leaves them so
    - num_threads: of a runner on the CPU; None is one for each core that the process may use
    - max_attention_window_size, sink_token_length: see `limit_attention`
    """

    dtype: DType = "auto"
    quantization: Quantization | None = None
    num_threads: int | None = None
    max_attention_window_size: int | list[int] | None = None
    sink_token_length: int = 0


DEFAULT_OPTIONS = RunnerOptions()


class UnsupportedOption(ValueError):
    """The runner cannot do what an option asks for."""


class LaunchedTokens(Protocol):
    """The tokens of a step that may still be running."""

    def wait(self) -> npt.NDArray[np.int32]:
        """A token for each draw, int32[R], INVALID_TOKEN where a logit was NaN. Raises what the step failed with."""


class PackedAdapter(Protocol):
    """An adapter as a runner computes with it, in memory of the host."""

    @property
    def num_bytes(self) -> int: ...


class Runner(ABC):
    """Executes a model. One call does a whole step; nothing of a sequence is kept but its cache blocks.

    - vocab_size: width of the logits
    - max_position: the longest sequence, in tokens, that the positions are made for
    - hidden_size: width of what stands for a token; 0 where nothing needs to know
    """

    vocab_size: int
    max_position: int
    hidden_size: int = 0
    can_overlap: ClassVar[bool] = False
    """Whether `launch` comes back before the step is done."""
    capabilities: frozenset[Capability] = frozenset()
    """What a request may ask for beyond plain decoding; the rest is refused before it runs."""
    window: AttentionWindow | None = None
    """What any layer sees at most; None: all. What has passed out of it loses its place in the cache."""

    @abstractmethod
    def allocate_cache(self, layout: CacheLayout) -> None:
        """Make the key-value cache; once, before the first step."""

    @abstractmethod
    def cache_bytes_per_block(self, block_size: int) -> int:
        """Memory of one block over all layers, in bytes; what the cache is sized by."""

    @property
    def share_of_free_memory(self) -> float:
        """What the cache takes if nobody says how much: other processes want some too."""
        return 0.25

    def free_memory(self) -> int:
        """Bytes that can be allocated where the cache will be; on the host without swapping."""
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")

    def device_memory(self) -> int:
        """Bytes that this runner has on a device other than the host."""
        return 0

    @abstractmethod
    def step(self, plan: StepPlan) -> Logits:
        """Compute the new tokens, write their keys and values, return logits float32[R, vocab_size].

        Row i belongs to plan.logits_rows[i]. They are the caller's until the next step: rows may be changed.
        """

    def hidden_states(self) -> Float32Array:
        """Of the last step, float32[H, hidden_size]: row i is what the last norm gave for plan.hidden_rows[i].

        For runners with the capability "hidden_states". They are the caller's until the next step.
        """
        raise NotImplementedError

    def choose(self, logits: Logits, draws: SamplingBatch) -> npt.NDArray[np.int32]:
        """A token for each of the first len(draws) rows of what `step` gave, as `token_sampling.choose` does.

        INVALID_TOKEN where a logit is NaN. A runner that can draw faster does.
        """
        return choose(logits[: len(draws)], draws)

    def keep_row_states(self) -> None:
        """Have `row_states` answer after each step; before the first. For runners with "hidden_states"."""
        raise NotImplementedError

    def row_states(self, rows: list[int]) -> Float32Array:
        """What the last norm gave for logits rows of the last step, float32[len(rows), hidden_size].

        Unlike `hidden_states`, it costs nothing: these rows are computed for their logits.
        """
        raise NotImplementedError

    def launch(self, plan: StepPlan, draws: SamplingBatch) -> LaunchedTokens:
        """Start a step and the choice of its tokens, for a runner that can overlap.

        A token id -1 - r of the plan stands for the token that row r of the step launched before chose.
        """
        raise NotImplementedError


class SpecRunner(Runner):
    """Executes any model that a `DecoderSpec` describes."""

    def __init__(self, spec: DecoderSpec) -> None:
        self.spec = spec
        self.vocab_size, self.max_position = spec.vocab_size, spec.max_position
        self.window = spec.widest_window
        self.hidden_size = spec.hidden_size

    @classmethod
    @abstractmethod
    def load(
        cls, spec: DecoderSpec, source: WeightSource, options: RunnerOptions = DEFAULT_OPTIONS
    ) -> SpecRunner:
        """Take the weights.

        Raises `CheckpointError` when a tensor is missing or has a wrong shape, `UnsupportedOption` for an option
        that this runner does not have.
        """

    def pack_adapter(self, adapter: LoraAdapter) -> PackedAdapter:
        """Make an adapter that fits the model ready, for a runner with the capability "lora". In any thread."""
        raise NotImplementedError

    def set_adapter(self, slot: int, adapter: PackedAdapter | None) -> None:
        """From the next step on this is the adapter of a slot (`StepPlan.adapter_slots`), None: none is."""
        raise NotImplementedError

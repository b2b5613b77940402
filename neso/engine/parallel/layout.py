"""The place of a rank among the ranks of a model."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RankLayout:
    """One of `tensor_parallel * pipeline_parallel` ranks.

    Pipeline stages hold consecutive layers; stage 0 embeds the tokens, the last stage computes the logits. The ranks of
    a stage form a tensor-parallel group, and each holds a part of every layer of the stage. Ranks are numbered from the
    last stage to the first, so that rank 0, which samples, is on the stage that computes the logits:

        tensor_parallel 2, pipeline_parallel 2     tp_rank 0    tp_rank 1
        last stage  (1)                            rank 0       rank 1
        first stage (0)                            rank 2       rank 3

    Raises `ValueError` if a size is below 1 or `rank` is not one of the ranks.
    """

    rank: int = 0
    tensor_parallel: int = 1
    pipeline_parallel: int = 1

    def __post_init__(self) -> None:
        if self.tensor_parallel < 1 or self.pipeline_parallel < 1:
            raise ValueError(
                f"numbers of ranks must be at least 1, got {self.tensor_parallel} and {self.pipeline_parallel}"
            )
        if not 0 <= self.rank < self.size:
            raise ValueError(f"rank {self.rank} is not one of {self.size} ranks")

    @property
    def size(self) -> int:
        """Number of ranks of the model."""
        return self.tensor_parallel * self.pipeline_parallel

    @property
    def tp_rank(self) -> int:
        """Place in the tensor-parallel group."""
        return self.rank % self.tensor_parallel

    @property
    def stage(self) -> int:
        """Pipeline stage; 0 embeds the tokens."""
        return self.pipeline_parallel - 1 - self.rank // self.tensor_parallel

    @property
    def is_first_stage(self) -> bool:
        return self.stage == 0

    @property
    def is_last_stage(self) -> bool:
        return self.stage == self.pipeline_parallel - 1

    @property
    def tp_group(self) -> range:
        """Ranks of this stage, by `tp_rank`."""
        first = self.rank - self.tp_rank
        return range(first, first + self.tensor_parallel)

    @property
    def previous(self) -> int:
        """The rank of the previous stage that sends its activations to this rank. Not for the first stage."""
        return self.rank + self.tensor_parallel

    @property
    def next(self) -> int:
        """The rank of the next stage that receives the activations of this rank. Not for the last stage."""
        return self.rank - self.tensor_parallel


SINGLE_RANK = RankLayout()


def split_evenly(count: int, parts: int, index: int) -> range:
    """Return the part `index` of range(count), divided into contiguous parts whose sizes differ by at most one."""
    size, rest = divmod(count, parts)
    begin = index * size + min(index, rest)
    return range(begin, begin + size + (index < rest))

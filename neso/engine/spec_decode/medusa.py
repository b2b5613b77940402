"""Medusa: extra heads on the model's hidden states propose a tree of draft tokens (arXiv 2401.10774)."""

from __future__ import annotations

import re
from collections.abc import Sequence as Many
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from neso.engine.core.sequence import Sequence
from neso.engine.runners.base import Runner
from neso.engine.runners.numpy_layers import linear, silu
from neso.engine.spec_decode.config import TreePath
from neso.engine.spec_decode.draft import Draft, DraftTree
from neso.engine.spec_decode.speculator import Proposer
from neso.engine.spec_decode.verification import Verified
from neso.engine.weights.safetensors_file import SafetensorsFile
from neso.engine.weights.source import CheckpointError, copy_as_float32

Float32Array = npt.NDArray[np.float32]
# "medusa_head.0.0.linear.weight" inside a model, "0.0.linear.weight" in a separate file.
_NAME = re.compile(r"(?:medusa_head\.)?(\d+\.\d+\.(?:linear\.)?(?:weight|bias))")


def tree_of(paths: Many[TreePath]) -> DraftTree:
    """Return the tree of paths in the order of `paths_of`."""
    numbers = {(): -1, **{path: number for number, path in enumerate(paths)}}
    return DraftTree(tuple(numbers[path[:-1]] for path in paths))


@dataclass(frozen=True, slots=True)
class MedusaHead:
    """Residual blocks followed by the output projection.

    - blocks: (float32[hidden, hidden], float32[hidden]) each: x + silu(weight @ x + bias)
    - output: float32[vocab_size, hidden]
    """

    blocks: list[tuple[Float32Array, Float32Array]]
    output: Float32Array

    def logits(self, hidden: Float32Array) -> Float32Array:
        """Compute float32[R, hidden] -> float32[R, vocab_size]."""
        for weight, bias in self.blocks:
            hidden = hidden + silu(linear(hidden, weight, bias))
        return linear(hidden, self.output)


@dataclass(frozen=True, slots=True)
class MedusaHeads:
    """Heads on a hidden state. The model's own head predicts the next token, head i the token i + 2 positions later."""

    heads: list[MedusaHead]

    @classmethod
    def load(cls, directory: Path, hidden_size: int, vocab_size: int) -> MedusaHeads:
        """Load the heads in float32 from the safetensors files of a directory. Raises `CheckpointError`."""
        if not directory.is_dir():
            raise CheckpointError(f"{directory}: there is no such directory")
        tensors = _tensors(directory)
        heads: list[MedusaHead] = []
        while f"{len(heads)}.0.linear.weight" in tensors or f"{len(heads)}.0.weight" in tensors:
            heads.append(_head(directory, tensors, len(heads), hidden_size, vocab_size))
        if not heads:
            raise CheckpointError(f"{directory}: there are no tensors medusa_head.*")
        return cls(heads)

    def candidates(self, hidden: Float32Array, count: int) -> list[npt.NDArray[np.int64]]:
        """Return the `count` most likely tokens of each head, most likely first: int64[R, count] per head."""
        return [_most_likely(head.logits(hidden), count) for head in self.heads]


def has_medusa_heads(directory: Path) -> bool:
    """Return whether the safetensors files of a directory have Medusa heads. Reads only their headers.

    Raises `CheckpointError` for an invalid file.
    """
    for path in sorted(directory.glob("*.safetensors")):
        file = SafetensorsFile(path)
        try:
            if any(_NAME.fullmatch(name) for name in file.names()):
                return True
        finally:
            file.close()
    return False


def _tensors(directory: Path) -> dict[str, Float32Array]:
    tensors = {}
    for path in sorted(directory.glob("*.safetensors")):
        file = SafetensorsFile(path)
        for name in file.names():
            match = _NAME.fullmatch(name)
            if match:
                stored = file.tensor(name)
                target = np.empty(stored.shape, np.float32)
                copy_as_float32(stored, target)
                tensors[match[1]] = target
        file.close()
    return tensors


def _head(
    directory: Path, tensors: dict[str, Float32Array], number: int, hidden_size: int, vocab_size: int
) -> MedusaHead:
    def take(name: str, *shape: int) -> Float32Array:
        found = tensors.get(f"{number}.{name}")
        if found is None or found.shape != shape:
            has = "none" if found is None else f"one of the shape {list(found.shape)}"
            raise CheckpointError(
                f"{directory}: Medusa's head {number} needs a tensor {name} of the shape {list(shape)}, has {has}"
            )
        return found

    blocks: list[tuple[Float32Array, Float32Array]] = []
    while f"{number}.{len(blocks)}.linear.weight" in tensors:
        name = f"{len(blocks)}.linear"
        blocks.append((take(f"{name}.weight", hidden_size, hidden_size), take(f"{name}.bias", hidden_size)))
    return MedusaHead(blocks, take(f"{len(blocks)}.weight", vocab_size, hidden_size))


def _most_likely(logits: Float32Array, count: int) -> npt.NDArray[np.int64]:
    count = min(count, logits.shape[1])
    best = np.argpartition(-logits, count - 1, axis=1)[:, :count]
    order = np.argsort(-np.take_along_axis(logits, best, axis=1), axis=1, kind="stable")
    return np.take_along_axis(best, order, axis=1)


class MedusaProposer(Proposer):
    """Runs the heads on the hidden state of each sampled token, and arranges their candidates as a tree.

    The runner must have "tree_attention" and "hidden_states". Raises `ValueError` if the tree is deeper than the number
    of heads.
    """

    def __init__(self, runner: Runner, heads: MedusaHeads, paths: Many[TreePath]) -> None:
        self.depth = max(len(path) for path in paths)
        if self.depth > len(heads.heads):
            raise ValueError(
                f"medusa_choices are {self.depth} tokens deep, there are {len(heads.heads)} heads"
            )
        self._runner = runner
        self._runner.keep_row_states()
        self._heads = MedusaHeads(heads.heads[: self.depth])
        self._paths = paths
        self._ranks = 1 + max(max(path) for path in paths)
        # Indexed by depth: the tree truncated to that depth.
        self._trees = [tree_of(paths[: self.num_nodes(depth)]) for depth in range(self.depth + 1)]

    def num_nodes(self, depth: int) -> int:
        """Return the number of nodes of the tree down to a depth."""
        return sum(len(path) <= depth for path in self._paths)

    def propose(self, sequence: Sequence, max_tokens: int) -> Draft | None:
        candidates: list[list[int]] | None = sequence.addons.get(self)
        if candidates is None:
            return None
        tree: DraftTree = self._trees[min(max_tokens, self.depth)]
        paths = self._paths[: len(tree.parents)]
        return Draft([candidates[len(path) - 1][path[-1]] for path in paths], tree)

    def observe(self, sequences: list[Sequence], verified: list[Verified]) -> None:
        if not sequences:
            return
        hidden = self._runner.row_states([result.row for result in verified])
        found = [tokens.tolist() for tokens in self._heads.candidates(hidden, self._ranks)]
        for row, sequence in enumerate(sequences):
            sequence.addons[self] = [tokens[row] for tokens in found]

"""Options of speculative decoding, and Medusa's trees of draft tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

TreePath = tuple[int, ...]
_DEPTH_1 = [(rank,) for rank in range(10)]
_DEPTH_2 = [
    *((0, rank) for rank in range(10)),
    *((1, rank) for rank in range(7)),
    *((2, rank) for rank in range(3)),
    *((3, rank) for rank in range(2)),
    *((rank, 0) for rank in range(4, 10)),
]
_DEPTH_3 = [
    *((0, 0, rank) for rank in range(10)),
    *((0, 1, rank) for rank in range(3)),
    *((0, 2, rank) for rank in range(2)),
    *((0, rank, 0) for rank in range(3, 8)),
    *((1, 0, rank) for rank in range(2)),
    (2, 0, 0),
]
_DEPTH_4 = [(0, 0, 0, 0), (0, 0, 0, 1)]
MC_SIM_7B_63: tuple[TreePath, ...] = (*_DEPTH_1, *_DEPTH_2, *_DEPTH_3, *_DEPTH_4)
"""Medusa's tree "mc_sim_7b_63", which its authors tuned on a 7B model. Path (0, 2) is the most likely candidate of the
first head, followed by the third most likely candidate of the second head.
"""


def paths_of(choices: Sequence[Sequence[int]]) -> list[TreePath]:
    """Return the paths of a tree, shorter ones first. Raises `ValueError` for a path whose prefix is missing."""
    paths = sorted({tuple(path) for path in choices}, key=lambda path: (len(path), path))
    if not paths or not paths[0]:
        raise ValueError("medusa_choices must be paths of one rank at least")
    known: set[TreePath] = {()}
    for path in paths:
        if path[:-1] not in known:
            raise ValueError(
                f"medusa_choices: the path {list(path)} follows {list(path[:-1])}, which is missing"
            )
        if min(path) < 0:
            raise ValueError(f"medusa_choices: a rank is negative in {list(path)}")
        known.add(path)
    return paths


Method = Literal["ngram", "draft_model", "medusa"]


class SpeculationConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Options of speculative decoding. The descriptions are the help texts of the options."""

    speculative: Annotated[
        Method | None,
        Meta(description="Source of draft tokens: n-grams of the text, a draft model, or Medusa heads."),
    ] = None
    speculative_model: Annotated[
        str | None, Meta(description="Directory of the draft model or of the Medusa heads.")
    ] = None
    num_speculative_tokens: Annotated[int, Meta(description="Number of draft tokens.")] = 5
    prompt_lookup_min: Annotated[int, Meta(description="Minimum length of a matching n-gram.")] = 2
    prompt_lookup_max: Annotated[int, Meta(description="Maximum length of a matching n-gram.")] = 4
    draft_sample_method: Annotated[
        Literal["greedy", "probabilistic"], Meta(description="Sampling of the draft model.")
    ] = "probabilistic"
    medusa_choices: Annotated[
        list[list[int]] | None, Meta(description="Tree of draft tokens, each a path of ranks.")
    ] = None
    adaptive_speculation: Annotated[
        bool, Meta(description="Draft fewer tokens, or none, when drafting does not pay off.")
    ] = True

    def __post_init__(self) -> None:
        if not 1 <= self.num_speculative_tokens <= 64:
            raise ValueError(
                f"num_speculative_tokens must be at least 1 and at most 64, got {self.num_speculative_tokens}"
            )
        if not 1 <= self.prompt_lookup_min <= self.prompt_lookup_max:
            raise ValueError(
                f"prompt_lookup_min ({self.prompt_lookup_min}) must be at least 1 and at most prompt_lookup_max "
                f"({self.prompt_lookup_max})"
            )
        if self.speculative == "draft_model" and self.speculative_model is None:
            raise ValueError("speculative draft_model needs the option speculative_model")

    @property
    def num_places(self) -> int:
        """Length of the longest draft; 0 if speculative decoding is disabled."""
        if self.method == "medusa":
            return max(len(path) for path in self.medusa_choices or MC_SIM_7B_63)
        return self.num_speculative_tokens if self.method is not None else 0

    @property
    def max_draft_tokens(self) -> int:
        """Maximum number of draft tokens of a sequence in a step; with Medusa, the nodes of the tree."""
        return len(self.medusa_choices or MC_SIM_7B_63) if self.method == "medusa" else self.num_places

    @property
    def method(self) -> Method | None:
        if self.speculative is None and self.speculative_model is not None:
            return "draft_model"
        return self.speculative

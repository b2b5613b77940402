"""Embeddings that replace prompt-token embeddings: soft prompts, prompts given as embeddings, images."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b
from typing import Protocol

import numpy as np
import numpy.typing as npt

from neso.engine.addons.image_positions import RotaryPlan
from neso.engine.core.addon import Addon, Failures, RequestError
from neso.engine.core.request import InputEmbeddings, PromptImage
from neso.engine.core.scheduler import Scheduler
from neso.engine.core.sequence import Sequence
from neso.engine.core.step import Step
from neso.engine.core.step_plan import Int32Array, PlanPart

logger = logging.getLogger(__name__)

Float32Array = npt.NDArray[np.float32]

_DIGEST_BYTES = 16


@dataclass(frozen=True, slots=True, eq=False)
class EmbeddingPlan(PlanPart):
    """Embeddings of a step, for runners with "input_embeddings".

    - positions int32[E]: flat positions, ascending, whose token embedding is replaced; the token id is a placeholder
    - rows float32[E, hidden_size]
    """

    positions: Int32Array
    rows: Float32Array


NO_EMBEDDINGS = EmbeddingPlan(np.empty(0, np.int32), np.empty((0, 0), np.float32))


@dataclass(slots=True, eq=False)
class EmbeddingRows:
    """Embeddings of one prompt: positions int32[E], ascending, and rows float32[E, hidden].

    `compute` returns the rows; it is called when a step first needs one. `digests` identify their content.
    `position_offsets`: see `image_positions.position_offsets`; None if rotary positions are those in the sequence.
    """

    positions: Int32Array
    compute: Callable[[], Float32Array]
    digests: list[bytes]
    position_offsets: Int32Array | None = None
    _rows: Float32Array | None = None

    @classmethod
    def of(cls, embeddings: InputEmbeddings) -> EmbeddingRows:
        rows = np.frombuffer(embeddings.rows, np.float32).reshape(-1, embeddings.hidden_size)
        digests = [blake2b(row.tobytes(), digest_size=_DIGEST_BYTES).digest() for row in rows]
        return cls(np.frombuffer(embeddings.positions, np.int32), lambda: rows, digests)

    def load(self, first: int, last: int) -> None:
        """Compute the rows if a position in [first, last) has one. Raises the errors of `compute`."""
        chosen = self.between(first, last)
        if self._rows is None and chosen.start < chosen.stop:
            self._rows = self.compute()

    @property
    def rows(self) -> Float32Array:
        assert self._rows is not None, "rows are used before load()"
        return self._rows

    def between(self, first: int, last: int) -> slice:
        """Return the slice of rows for the positions [first, last)."""
        low, high = np.searchsorted(self.positions, (first, last)).tolist()
        return slice(low, high)


class ImageTower(Protocol):
    """Computes the embeddings of images."""

    def embedding_rows(self, images: list[PromptImage]) -> EmbeddingRows: ...


class EmbeddingInputs(Addon):
    """Passes prompt embeddings to runners with "input_embeddings"."""

    def __init__(self, images: ImageTower | None = None) -> None:
        self.images = images

    def admit(self, sequence: Sequence) -> None:
        request = sequence.request
        if request.images and self.images is not None:
            rows = self.images.embedding_rows(request.images)
        elif request.input_embeddings is not None:
            rows = EmbeddingRows.of(request.input_embeddings)
        else:
            return
        sequence.addons[self] = rows
        sequence.placeholders = dict(zip(rows.positions.tolist(), rows.digests, strict=True))

    def fork(self, parent: Sequence, child: Sequence) -> None:
        if self in parent.addons:
            child.addons[self] = parent.addons[self]

    def prepare(self, step: Step, scheduler: Scheduler) -> Failures:
        failures: Failures = []
        for scheduled in step.users.get(self, ()):
            sequence = scheduled.sequence
            try:
                sequence.addons[self].load(sequence.num_computed_tokens, scheduled.end)
            except Exception as error:
                logger.error("the images of request '%s' failed", sequence.request.request_id, exc_info=error)
                failures.append((sequence, RequestError(f"processing its images failed: {error}")))
        return failures

    def extend(self, step: Step) -> None:
        positions, rows = [], []
        for scheduled in step.users[self]:
            first, embeddings = scheduled.sequence.num_computed_tokens, scheduled.sequence.addons[self]
            chosen = embeddings.between(first, scheduled.end)
            if chosen.start < chosen.stop:
                positions.append(embeddings.positions[chosen] + np.int32(scheduled.query_start - first))
                rows.append(embeddings.rows[chosen])
        if rows:
            step.add_part(EmbeddingPlan(np.concatenate(positions), np.concatenate(rows)))
        self._add_positions(step)

    def _add_positions(self, step: Step) -> None:
        users = [(s, s.sequence.addons[self].position_offsets) for s in step.users[self]]
        if all(table is None for _, table in users):
            return
        offsets = np.zeros((3, sum(scheduled.num_new_tokens for scheduled in step.scheduled)), np.int32)
        for scheduled, table in users:
            if table is None:
                continue
            positions = np.arange(scheduled.sequence.num_computed_tokens, scheduled.end)
            columns = slice(scheduled.query_start, scheduled.query_start + scheduled.num_new_tokens)
            offsets[:, columns] = table[:, np.minimum(positions, table.shape[1] - 1)]
        step.add_part(RotaryPlan(offsets))

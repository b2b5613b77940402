"""Pools the hidden states of a text into one vector and post-processes it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt

from neso.engine.core.step_plan import Int32Array, PlanPart
from neso.generation.pooling import PoolingKind, PoolingParams

Float32Array = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class PoolingPlan(PlanPart):
    """Rows of a step that are pooled, for runners with "hidden_states".

    rows int32[H]: flat positions whose final hidden states are returned.
    """

    rows: Int32Array


@dataclass(frozen=True, slots=True)
class DenseLayer:
    """activation(weight . x + bias), applied after pooling."""

    weight: Float32Array
    bias: Float32Array | None
    activation: Literal["identity", "tanh"]

    def __call__(self, x: Float32Array) -> Float32Array:
        y: Float32Array = self.weight @ x
        if self.bias is not None:
            y = y + self.bias
        return np.tanh(y) if self.activation == "tanh" else y


def class_probabilities(logits: Float32Array, *, multi_label: bool) -> Float32Array:
    """Return probabilities float32[labels]: sigmoid for one label or multi-label models, otherwise softmax."""
    if multi_label or len(logits) == 1:
        sigmoid: Float32Array = np.float32(1) / (np.float32(1) + np.exp(-logits))
        return sigmoid
    weights = np.exp(logits - logits.max())
    probabilities: Float32Array = weights / weights.sum()
    return probabilities


@dataclass(frozen=True, slots=True, eq=False)
class DecoderClassifier:
    """logits = weight . x, for the final hidden state x of a text's last token. weight float32[labels, hidden]."""

    labels: tuple[str, ...]
    multi_label: bool
    weight: Float32Array

    def logits(self, hidden: Float32Array) -> Float32Array:
        """Return float32[labels] for float32[hidden]."""
        logits: Float32Array = self.weight @ hidden
        return logits


@dataclass(frozen=True, slots=True)
class Pooler:
    """Pooling settings of a model: the defaults of `PoolingParams`, and what is applied to a pooled vector.

    - dense: layers of embeddings
    - classifier: of a decoder
    """

    kind: PoolingKind
    normalize: bool = True
    dense: tuple[DenseLayer, ...] = field(default=())
    classifier: DecoderClassifier | None = None

    def kind_for(self, params: PoolingParams) -> PoolingKind:
        return params.pooling or self.kind

    def dimensions(self, hidden_size: int) -> int:
        """Return the width of the result of `finish`."""
        return len(self.dense[-1].weight) if self.dense else hidden_size

    def finish(self, pooled: Float32Array, params: PoolingParams) -> Float32Array:
        """Return the result for a pooled vector float32[hidden].

        The output of the classifier, or an embedding: apply the dense layers, truncate, normalize.
        """
        if params.task == "classify":
            assert self.classifier is not None
            logits = self.classifier.logits(pooled)
            if not params.activation:
                return logits
            return class_probabilities(logits, multi_label=self.classifier.multi_label)
        for layer in self.dense:
            pooled = layer(pooled)
        if params.dimensions is not None:
            pooled = pooled[: params.dimensions]
        if params.normalize if params.normalize is not None else self.normalize:
            pooled = pooled / max(float(np.linalg.norm(pooled)), 1e-12)
        return np.ascontiguousarray(pooled, np.float32)


@dataclass(slots=True)
class PooledSoFar:
    """Pools a text whose hidden states arrive in chunks."""

    kind: PoolingKind
    num_tokens: int = 0
    _vector: Float32Array | None = None

    def add(self, hidden: Float32Array) -> None:
        """Add the hidden states of the next tokens, float32[T, hidden], at least one."""
        if self.kind == "mean":
            self._vector = hidden.sum(axis=0, dtype=np.float32) + (
                0 if self._vector is None else self._vector
            )
        elif self.kind == "max":
            highest = hidden.max(axis=0)
            self._vector = highest if self._vector is None else np.maximum(self._vector, highest)
        elif self.kind == "last":
            self._vector = hidden[-1].copy()
        elif self._vector is None:
            self._vector = hidden[0].copy()
        self.num_tokens += len(hidden)

    def vector(self) -> Float32Array:
        assert self._vector is not None, "no tokens yet"
        return self._vector / np.float32(self.num_tokens) if self.kind == "mean" else self._vector

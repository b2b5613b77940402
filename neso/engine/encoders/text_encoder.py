"""Text encoders: compute hidden states of tokens and the logits of a classifier."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from neso.engine.runners.base import LayerStack
from neso.engine.runners.numpy_layers import layer_norm
from neso.engine.runners.runner_options import RunnerOptions
from neso.engine.specs.encoder_spec import ClassifierSpec, EncoderSpec
from neso.engine.weights.model_tensors import EncoderTensors
from neso.engine.weights.source import TensorSource

Int32Array = npt.NDArray[np.int32]

Float32Array = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Classifier:
    """Classification head of two matrices [outputs, inputs]. With one output, it computes the score of a reranker."""

    spec: ClassifierSpec
    dense_weight: Float32Array
    dense_bias: Float32Array
    out_weight: Float32Array
    out_bias: Float32Array

    @classmethod
    def load(cls, spec: ClassifierSpec, hidden_size: int, tensors: EncoderTensors) -> Classifier:
        labels = len(spec.labels)
        return cls(
            spec,
            tensors.weight(spec.dense, (hidden_size, hidden_size)),
            tensors.bias(spec.dense, hidden_size),
            tensors.weight(spec.out, (labels, hidden_size)),
            tensors.bias(spec.out, labels),
        )

    def logits(self, first: Float32Array) -> Float32Array:
        """Return logits float32[S, labels] for the first tokens' hidden states float32[S, hidden]."""
        dense = first @ self.dense_weight.T + self.dense_bias
        activated = np.tanh(dense) if self.spec.activation == "tanh" else np.maximum(dense, np.float32(0))
        logits: Float32Array = activated @ self.out_weight.T + self.out_bias
        return logits

    def activate(self, logits: Float32Array) -> Float32Array:
        """Return probabilities float32[S, labels]: sigmoid for one label or multi-label models, otherwise softmax."""
        if self.spec.multi_label or len(self.spec.labels) == 1:
            sigmoid: Float32Array = np.float32(1) / (np.float32(1) + np.exp(-logits))
            return sigmoid
        weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
        probabilities: Float32Array = weights / weights.sum(axis=-1, keepdims=True)
        return probabilities


@dataclass(frozen=True, slots=True)
class TextBatch:
    """A flat batch without padding: token_ids and token_types int32[T], starts int32[S + 1] from 0 to T."""

    token_ids: Int32Array
    token_types: Int32Array
    starts: Int32Array

    @classmethod
    def of(cls, prompts: list[tuple[list[int], list[int] | None]]) -> TextBatch:
        """Create a batch from (token ids, token types) of each sequence; types None means all 0."""
        starts = np.cumsum([0, *(len(ids) for ids, _ in prompts)])
        types = [t for ids, given in prompts for t in (given or [0] * len(ids))]
        ids = [token for tokens, _ in prompts for token in tokens]
        return cls(np.array(ids, np.int32), np.array(types, np.int32), starts.astype(np.int32))


class TextEncoder:
    """The embedding tables of an `EncoderSpec`, its layers and its classifier."""

    def __init__(
        self,
        spec: EncoderSpec,
        tables: _Tables,
        layers: LayerStack,
        classifier: Classifier | None,
    ) -> None:
        self.spec = spec
        self.layers = layers
        self.classifier = classifier
        self._tables = tables

    @classmethod
    def load(
        cls, spec: EncoderSpec, source: TensorSource, stack: type[LayerStack], options: RunnerOptions
    ) -> TextEncoder:
        """Load the weights.

        Raises `CheckpointError` if a tensor is missing or has the wrong shape, `UnsupportedOption`.
        """
        tensors = EncoderTensors(source, (spec.prefix,))
        classifier = None
        if spec.classifier is not None:
            classifier = Classifier.load(spec.classifier, spec.hidden_size, tensors)
        layers = stack.load(spec.layers, tensors, options)
        return cls(spec, _Tables.load(spec, tensors), layers, classifier)

    def encode(self, batch: TextBatch) -> Float32Array:
        """Return the final hidden states float32[T, hidden]."""
        tables, spec = self._tables, self.spec
        x = tables.word[batch.token_ids]
        x += tables.position[self._positions(batch)]
        if tables.type is not None:
            x += tables.type[np.minimum(batch.token_types, len(tables.type) - 1)]
        x = layer_norm(x, tables.norm_weight, tables.norm_bias, spec.layers.norm_eps)
        return self.layers.run(x, batch.starts)

    def _positions(self, batch: TextBatch) -> npt.NDArray[np.int64]:
        lengths, first = np.diff(batch.starts), batch.starts[:-1].astype(np.int64)
        padding_id = self.spec.padding_id
        if padding_id is None:
            return np.arange(batch.starts[-1]) - np.repeat(first, lengths)
        # Padding tokens in a prompt have the position padding_id.
        counts = batch.token_ids != padding_id
        running = np.cumsum(counts)
        before = np.repeat(running[first] - counts[first], lengths)
        positions: npt.NDArray[np.int64] = (running - before) * counts + padding_id
        return positions


@dataclass(frozen=True, slots=True)
class _Tables:
    word: Float32Array
    position: Float32Array
    type: Float32Array | None
    norm_weight: Float32Array
    norm_bias: Float32Array

    @classmethod
    def load(cls, spec: EncoderSpec, tensors: EncoderTensors) -> _Tables:
        hidden, names = spec.hidden_size, spec.tensor_names
        types = spec.num_token_types
        return cls(
            word=tensors.weight(names["word"], (spec.vocab_size, hidden)),
            position=tensors.weight(names["position"], (spec.num_positions, hidden)),
            type=tensors.weight(names["type"], (types, hidden)) if types else None,
            norm_weight=tensors.weight(names["norm"], (hidden,)),
            norm_bias=tensors.bias(names["norm"], hidden),
        )

"""Text encoders: compute hidden states of tokens and the logits of a classifier."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from neso.engine.pooling.pooler import class_probabilities
from neso.engine.runners.base import LayerStack
from neso.engine.runners.numpy_layers import ACTIVATIONS, layer_norm, linear
from neso.engine.runners.runner_options import RunnerOptions, UnsupportedOption, reject_thread_binding
from neso.engine.specs.encoder_spec import ClassifierSpec, EncoderSpec, LayerStackSpec
from neso.engine.weights.model_tensors import EncoderTensors
from neso.engine.weights.source import TensorSource

Int32Array = npt.NDArray[np.int32]

Float32Array = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Classifier:
    """Classification head of two matrices [outputs, inputs]. With one output, it computes the score of a reranker."""

    spec: ClassifierSpec
    norm_eps: float
    dense_weight: Float32Array
    dense_bias: Float32Array | None
    norm_weight: Float32Array | None
    norm_bias: Float32Array | None
    out_weight: Float32Array
    out_bias: Float32Array

    @classmethod
    def load(cls, spec: ClassifierSpec, layers: LayerStackSpec, tensors: EncoderTensors) -> Classifier:
        labels, hidden = len(spec.labels), layers.hidden_size
        return cls(
            spec,
            layers.norm_eps,
            tensors.weight(spec.dense, (hidden, hidden)),
            tensors.bias(spec.dense, hidden) if spec.dense_bias else None,
            tensors.weight(spec.norm, (hidden,)) if spec.norm else None,
            tensors.bias(spec.norm, hidden) if spec.norm and spec.norm_bias else None,
            tensors.weight(spec.out, (labels, hidden)),
            tensors.bias(spec.out, labels),
        )

    def logits(self, hidden: Float32Array) -> Float32Array:
        """Return logits float32[labels] for the hidden states of a text, float32[T, hidden]."""
        pooled = hidden[:1] if self.spec.pooling == "cls" else hidden.mean(axis=0, keepdims=True)
        dense = linear(pooled, self.dense_weight, self.dense_bias)
        x = np.tanh(dense) if self.spec.activation == "tanh" else ACTIVATIONS[self.spec.activation](dense)
        if self.norm_weight is not None:
            x = layer_norm(x, self.norm_weight, self.norm_bias, self.norm_eps)
        logits: Float32Array = linear(x, self.out_weight, self.out_bias)[0]
        return logits

    def activate(self, logits: Float32Array) -> Float32Array:
        """Return probabilities float32[labels], see `class_probabilities`."""
        return class_probabilities(logits, multi_label=self.spec.multi_label)


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
        if options.attention_backend != "auto":
            raise UnsupportedOption(
                f"attention_backend: embedding models have no {options.attention_backend}; use auto"
            )
        if not stack.binds_threads:
            reject_thread_binding(options)
        tensors = EncoderTensors(source, (spec.prefix,))
        classifier = None
        if spec.classifier is not None:
            classifier = Classifier.load(spec.classifier, spec.layers, tensors)
        layers = stack.load(spec.layers, tensors, options)
        return cls(spec, _Tables.load(spec, tensors), layers, classifier)

    def encode(self, batch: TextBatch) -> Float32Array:
        """Return the final hidden states float32[T, hidden]."""
        tables, spec = self._tables, self.spec
        x = tables.word[batch.token_ids]
        if tables.position is not None:
            x += tables.position[self._positions(batch)]
        if tables.type is not None:
            x += tables.type[np.minimum(batch.token_types, len(tables.type) - 1)]
        x = layer_norm(x, tables.norm_weight, tables.norm_bias, spec.layers.norm_eps)
        x = self.layers.run(x, batch.starts)
        if tables.final_norm_weight is None:
            return x
        return layer_norm(x, tables.final_norm_weight, tables.final_norm_bias, spec.layers.norm_eps)

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
    position: Float32Array | None
    type: Float32Array | None
    norm_weight: Float32Array
    norm_bias: Float32Array | None
    final_norm_weight: Float32Array | None
    final_norm_bias: Float32Array | None

    @classmethod
    def load(cls, spec: EncoderSpec, tensors: EncoderTensors) -> _Tables:
        hidden, names = spec.hidden_size, spec.tensor_names
        types, positions = spec.num_token_types, spec.num_positions
        biased, final = "mlp_norm" in spec.layers.biased, names.get("final_norm")
        return cls(
            word=tensors.weight(names["word"], (spec.vocab_size, hidden)),
            position=tensors.weight(names["position"], (positions, hidden)) if positions else None,
            type=tensors.weight(names["type"], (types, hidden)) if types else None,
            norm_weight=tensors.weight(names["norm"], (hidden,)),
            norm_bias=tensors.bias(names["norm"], hidden) if biased else None,
            final_norm_weight=tensors.weight(final, (hidden,)) if final else None,
            final_norm_bias=tensors.bias(final, hidden) if final and biased else None,
        )

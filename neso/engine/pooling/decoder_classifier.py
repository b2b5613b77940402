"""Classifiers of decoders: the head of a "...ForSequenceClassification" checkpoint, or the logits of a few tokens."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from neso.engine.pooling.pooler import DecoderClassifier
from neso.engine.specs.config_reader import ConfigReader, UnsupportedModel
from neso.engine.specs.decoder_spec import DecoderSpec
from neso.engine.specs.encoder_spec import is_classifier, is_multi_label, read_labels
from neso.engine.text.tokenizer import load_tokenizer
from neso.engine.weights.model_tensors import DecoderTensors
from neso.engine.weights.quantized import dense, take_rows
from neso.engine.weights.source import CheckpointError, TensorSource

_HEAD = "score.weight"


def read_head(source: TensorSource, hidden_size: int) -> DecoderClassifier | None:
    """Return the head of a "...ForSequenceClassification" checkpoint; None for other checkpoints.

    Raises `CheckpointError` if its tensor is missing or has another shape.
    """
    config = ConfigReader(source.config)
    if not is_classifier(config):
        return None
    labels = read_labels(config)
    if _HEAD not in source:
        raise CheckpointError(f"{source.directory}: there is no tensor {_HEAD!r}, the head of the classifier")
    weight = np.empty((len(labels), hidden_size), np.float32)
    source.read_float32(_HEAD, weight)
    return DecoderClassifier(labels, is_multi_label(config), weight)


def classifier_of_tokens(
    words: str, spec: DecoderSpec, source: TensorSource, tokenizer: Path
) -> DecoderClassifier:
    """Return a classifier whose labels are tokens of the vocabulary, separated by commas in `words`.

    Its logits are those of the tokens. Of two tokens, such as "no,yes", it has one label, the second token, with the
    difference of the logits: its sigmoid is the probability of the second token. Raises `UnsupportedModel`,
    `CheckpointError`.
    """
    labels = words.split(",")
    if len(labels) < 2:
        raise UnsupportedModel(
            f"classifier_from_token: '{words}' must name at least two tokens, as in 'no,yes'"
        )
    encoded = load_tokenizer(tokenizer).encode_batch(labels, add_special_tokens=False)
    for label, ids in zip(labels, encoded, strict=True):
        if len(ids) != 1:
            raise UnsupportedModel(f"classifier_from_token: '{label}' is {len(ids)} tokens, not one")
    if spec.logit_softcap is not None or spec.lm_head_bias:
        raise UnsupportedModel("classifier_from_token: the model caps its logits, or its LM head has a bias")
    tensors, tokens = DecoderTensors(spec, source), np.array(encoded, np.intp)[:, 0]
    if spec.tied_embeddings:
        rows = np.asarray(tensors.table("embedding")[tokens], np.float32)
    else:
        rows = np.asarray(dense(take_rows(tensors.matrix("lm_head"), tokens)), np.float32)
    rows = rows * np.float32(spec.logit_scale)
    if len(labels) == 2:
        return DecoderClassifier((labels[1],), False, rows[1:] - rows[:1])
    return DecoderClassifier(tuple(labels), False, rows)

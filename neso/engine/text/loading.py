"""The tokenizer of a model by the model's name."""

from __future__ import annotations

from pathlib import Path

from neso.engine.text.tokenizer import Tokenizer
from neso.engine.weights.hub import resolve_model


def load_tokenizer(model: str | Path) -> Tokenizer:
    """Of a checkpoint directory, a GGUF file, a model that ships, or one on the hub.

    Raises `ModelNotFound` and `TokenizerError`, which say what is missing.
    """
    return Tokenizer.from_model(resolve_model(model))

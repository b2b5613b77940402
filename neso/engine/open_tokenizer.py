"""The tokenizer of an engine."""

from __future__ import annotations

from pathlib import Path

from neso.engine.config import EngineConfig
from neso.engine.text.tokenizer import NO_TOKENIZER, NoTokenizer, Tokenizer

EngineText = Tokenizer | NoTokenizer


def open_tokenizer(config: EngineConfig) -> EngineText:
    """Load what the options say. Raises `TokenizerError`."""
    return NO_TOKENIZER if config.skip_tokenizer_init else Tokenizer.from_model(Path(config.tokenizer_path))

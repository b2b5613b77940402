"""What can go wrong while a tokenizer is loaded."""

from __future__ import annotations


class TokenizerError(ValueError):
    """The tokenizer files of a model cannot be used. The message names the file and says what to do."""

"""Text of the engine: tokens, chat templates, incremental text and stop strings."""

from neso.engine.text.detokenizer import Detokenizer
from neso.engine.text.errors import TokenizerError
from neso.engine.text.sequence_text import SequenceText, TextDelta
from neso.engine.text.stop_strings import StopChecker
from neso.engine.text.tokenizer import Tokenizer

__all__ = ["Detokenizer", "SequenceText", "StopChecker", "TextDelta", "Tokenizer", "TokenizerError"]

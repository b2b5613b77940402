"""The interface of logits processors, and how they are found by the option `logits_processors`."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from neso.engine.text.tokenizer import Tokenizer

ENTRY_POINT_GROUP = "neso.logits_processors"


@dataclass(frozen=True, slots=True)
class SequenceTokens:
    """The tokens of a sequence before the one that is sampled next. Do not modify the lists."""

    request_id: str
    prompt_token_ids: list[int]
    output_token_ids: list[int]


LogitsProcessor = Callable[[npt.NDArray[np.float32], Sequence[SequenceTokens]], None]
"""Changes logits float32[R, vocab_size] in place. Row i is for the next token of sequence i.

Called once per step with the rows of all requests that chose it, before penalties, biases and temperature. Minus
infinity excludes a token. If it raises, it is called again for each row alone, and the requests of the rows for which
it raises then fail. A row can follow draft tokens, so a sequence can appear with different tokens; if it raises for
such a row, no token is sampled from it, and the request does not fail.
"""


class ProcessorContext:
    """Argument with which the engine creates an instance of a class of logits processors.

    - vocab_size: width of the logits
    - tokenizer: the model's tokenizer, loaded at first access; raises `ValueError` if the engine has none
    """

    def __init__(self, vocab_size: int, tokenizer_path: str | None) -> None:
        """`tokenizer_path`: the tokenizer's directory or GGUF file; None if the engine has no tokenizer."""
        self.vocab_size = vocab_size
        self._tokenizer_path = tokenizer_path

    @cached_property
    def tokenizer(self) -> Tokenizer:
        if self._tokenizer_path is None:
            raise ValueError("the engine has no tokenizer (skip_tokenizer_init)")
        return Tokenizer.from_model(self._tokenizer_path)


class ProcessorError(ValueError):
    """A logits processor cannot be loaded. The message names it."""


def load_processors(registered: Mapping[str, Any], context: ProcessorContext) -> dict[str, LogitsProcessor]:
    """Return the processors by name. Raises `ProcessorError`.

    A value of `registered` is a processor, or where to find one: "FILE.py:ATTRIBUTE", "MODULE:ATTRIBUTE", or the name
    of an entry point in the group `neso.logits_processors`. A class is called with the context and returns the
    processor.
    """
    processors: dict[str, LogitsProcessor] = {}
    for name, value in registered.items():
        try:
            found: Any = _find(value) if isinstance(value, str) else value
            if isinstance(found, type):
                found = found(context)
            if not callable(found):
                raise TypeError(f"{value!r} is not callable")
            processors[name] = found
        except Exception as error:
            raise ProcessorError(f"logits processor '{name}': {type(error).__name__}: {error}") from error
    return processors


def _find(place: str) -> Any:
    source, _, attribute = place.rpartition(":")
    if not source:
        return _entry_point(place)
    module = _module_of_file(Path(source)) if source.endswith(".py") else import_module(source)
    found: Any = module
    for part in attribute.split("."):
        found = getattr(found, part)
    return found


def _entry_point(name: str) -> Any:
    for entry_point in entry_points(group=ENTRY_POINT_GROUP, name=name):
        return entry_point.load()
    raise LookupError(f"there is no entry point '{name}' in the group {ENTRY_POINT_GROUP}")


def _module_of_file(path: Path) -> Any:
    """Execute a Python file as a module of its own; the file need not be on `sys.path`."""
    spec = importlib.util.spec_from_file_location(f"neso_logits_processors_{path.stem}", path)
    if spec is None or spec.loader is None or not path.is_file():
        raise FileNotFoundError(f"{path}: there is no such file")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module

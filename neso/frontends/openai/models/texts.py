"""The tokenizers of models that have none of their own face: where they are, and how long a prompt may be."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary, WeakSet

from neso.engine.text.no_tokenizer import NO_TOKENIZER
from neso.frontends.openai.tensor_models.model import NO_LIMIT
from neso.generation import TextTools
from neso.server.config.parameters import string_parameter
from neso.server.errors import ServerError

if TYPE_CHECKING:
    from neso.server.core import Core
    from neso.server.model import Model

logger = logging.getLogger(__name__)

_TOKENIZER = "tokenizer_dir"
_LIMITS = ("max_model_len", "max_seq_len")
_SCRIPTED = "tensorrt_llm_model_name"
"""The parameter that business logic in TensorRT-LLM's layout names its model by; it calls `preprocessing` as well."""
_PREPROCESSING = "preprocessing"


class ModelTexts:
    """Looks at a model's configuration, and at the models that it calls. `default` is for models without."""

    def __init__(self, core: Core, default: TextTools | None) -> None:
        self._core = core
        self._default = default
        self._found: WeakKeyDictionary[Model, TextTools] = WeakKeyDictionary()
        self._failed: WeakSet[Model] = WeakSet()

    async def tokenizer(self, model: Model) -> TextTools | None:
        """The model's own (`tokenizer_dir` of it or of a model that it calls), else the default one, if any."""
        found = self._found.get(model)
        if found is None:
            found = await self._find(model) or self._default
            if found is not None:
                self._found[model] = found
        return found

    def max_model_len(self, model: Model) -> int:
        """Most tokens of prompt and answer together; `NO_LIMIT` where nobody tells."""
        for related in self._related(model):
            for name in _LIMITS:
                limit = string_parameter(related.config, name)
                if limit.isdecimal():
                    return int(limit)
            if related.language_model is not None:
                return related.language_model.max_model_len
        return NO_LIMIT

    async def _find(self, model: Model) -> TextTools | None:
        related = list(self._related(model))
        for other in related:
            directory = string_parameter(other.config, _TOKENIZER)
            if directory and not directory.startswith("${"):  # a template that nobody has filled in
                return None if other in self._failed else await self._load(other, directory)
        for other in related:
            face = other.language_model
            if face is not None and face.text is not NO_TOKENIZER:
                return face.text
        return None

    async def _load(self, model: Model, directory: str) -> TextTools | None:
        try:
            return await asyncio.to_thread(open_tokenizer, directory, model.directory)
        except ValueError as error:
            logger.error("model '%s': its %s cannot be used: %s", model.name, _TOKENIZER, error)
            self._failed.add(model)
            return None

    def _related(self, model: Model) -> Iterator[Model]:
        """The model, and those that it calls, as far as its configuration tells."""
        pending, seen = [model], {model.name}
        while pending:
            model = pending.pop(0)
            yield model
            for name in _called(model):
                if name not in seen:
                    seen.add(name)
                    with suppress(ServerError):  # it is not loaded
                        pending.append(self._core.model(name))


def open_tokenizer(name: str, near: Path | None = None) -> TextTools:
    """The tokenizer in a directory, which may be relative to `near`, or of a name on the hub. Raises `ValueError`."""
    from neso.engine.text.tokenizer import Tokenizer
    from neso.engine.weights.hub import TOKENIZER_FILES, ModelNotFound, resolve_model

    local = Path(name) if near is None else near / name
    try:
        directory = local if local.is_dir() else resolve_model(name, patterns=TOKENIZER_FILES)
    except ModelNotFound as error:
        raise ValueError(f"no tokenizer: {error}") from None
    return Tokenizer.from_model(directory)


def _called(model: Model) -> list[str]:
    """The names of the models that a model calls itself."""
    called = [step.model_name for step in model.config.ensemble_scheduling.step]
    if scripted := string_parameter(model.config, _SCRIPTED):
        called += [_PREPROCESSING, scripted]
    return called

"""Tokenizers and chat templates of models without a tokenizer, such as ensembles and Python models."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn
from weakref import WeakKeyDictionary, WeakSet

from neso.engine.text.tokenizer import NO_TOKENIZER, NoTokenizer
from neso.generation import UNLIMITED_LENGTH, InvalidParameter, TokenizerLike
from neso.generation.language_model import TokenBytes
from neso.server.config.model_config import string_parameter
from neso.server.errors import ServerError

if TYPE_CHECKING:
    from neso.engine.text.chat_template import ChatTemplate
    from neso.server.core import Core
    from neso.server.model import Model

logger = logging.getLogger(__name__)

_TOKENIZER_PARAMETER = "tokenizer_dir"
_LENGTH_PARAMETERS = ("max_model_len", "max_seq_len")
_CALLED_MODEL_PARAMETER = "tensorrt_llm_model_name"
"""Parameter that names the model called by a BLS model of TensorRT-LLM's layout, in addition to `preprocessing`."""
_PREPROCESSING = "preprocessing"


class ModelTokenizers:
    """Finds tokenizers in the configurations of a model and of the models that it calls, else returns `default`."""

    def __init__(self, core: Core, default: TokenizerLike | None) -> None:
        self._core = core
        self._default = default
        self._found: WeakKeyDictionary[Model, TokenizerLike] = WeakKeyDictionary()
        self._failed: WeakSet[Model] = WeakSet()

    async def find(self, model: Model) -> TokenizerLike | None:
        """Return the tokenizer in `tokenizer_dir` of the model or of a model that it calls, else the default."""
        found = self._found.get(model)
        if found is None:
            found = await self._find(model) or self._default
            if found is not None:
                self._found[model] = found
        return found

    def max_model_len(self, model: Model) -> int:
        """Maximum tokens of prompt and output together; `UNLIMITED_LENGTH` if unknown."""
        for related in self._related(model):
            for name in _LENGTH_PARAMETERS:
                limit = string_parameter(related.config, name)
                if limit.isdecimal():
                    return int(limit)
            if related.language_model is not None:
                return related.language_model.max_model_len
        return UNLIMITED_LENGTH

    async def _find(self, model: Model) -> TokenizerLike | None:
        related = list(self._related(model))
        for other in related:
            directory = string_parameter(other.config, _TOKENIZER_PARAMETER)
            if directory and not directory.startswith("${"):  # an unfilled template
                return None if other in self._failed else await self._load(other, directory)
        for other in related:
            language_model = other.language_model
            if language_model is not None and language_model.text is not NO_TOKENIZER:
                return language_model.text
        return None

    async def _load(self, model: Model, directory: str) -> TokenizerLike | None:
        try:
            return await asyncio.to_thread(open_tokenizer, directory, model.directory)
        except ValueError as error:
            logger.error("model '%s': its %s cannot be used: %s", model.name, _TOKENIZER_PARAMETER, error)
            self._failed.add(model)
            return None

    def _related(self, model: Model) -> Iterator[Model]:
        """Yield the model and, breadth first, the models that it calls according to its configuration."""
        pending, seen = [model], {model.name}
        while pending:
            model = pending.pop(0)
            yield model
            for name in _called_models(model):
                if name not in seen:
                    seen.add(name)
                    with suppress(ServerError):  # not loaded
                        pending.append(self._core.model(name))


class ChatTemplateOverride:
    """A `TokenizerLike` with another chat template."""

    has_chat_template = True

    def __init__(self, tokenizer: TokenizerLike, source: str) -> None:
        self._tokenizer = tokenizer
        self.chat_template_source = source

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes | None:
        """See `TokenBytes`."""
        return self._tokenizer.token_bytes(token_id) if isinstance(self._tokenizer, TokenBytes) else None

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        special_tokens = getattr(self._tokenizer, "special_tokens", None)
        texts = special_tokens.texts if special_tokens else {}
        template = _compile_template(self.chat_template_source, tuple(sorted(texts.items())))
        return template.render(
            messages, tools=tools, add_generation_prompt=add_generation_prompt, variables=variables
        )


class MissingTokenizer(NoTokenizer):
    """The `TokenizerLike` of a model with an unknown tokenizer; every use raises `InvalidParameter`."""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        self._reject()

    def _reject(self) -> NoReturn:
        raise InvalidParameter("model", "no tokenizer is known for this model, so the prompt must be text")


MISSING_TOKENIZER = MissingTokenizer()


def open_tokenizer(name: str, relative_to: Path | None = None) -> TokenizerLike:
    """Open the tokenizer in a directory, or of a model on the hub. Raises `ValueError`."""
    from neso.engine.text.tokenizer import Tokenizer
    from neso.engine.weights.hub import TOKENIZER_FILES, ModelNotFound, resolve_model

    local = Path(name) if relative_to is None else relative_to / name
    try:
        directory = local if local.is_dir() else resolve_model(name, patterns=TOKENIZER_FILES)
    except ModelNotFound as error:
        raise ValueError(f"no tokenizer: {error}") from None
    return Tokenizer.from_model(directory)


def read_chat_template(value: str) -> str:
    """Return `value` if it is a Jinja2 template, else the content of the named file. Raises `ValueError`."""
    if "{{" in value or "{%" in value:
        return value
    try:
        return Path(value).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ValueError(f"the chat template '{value}' cannot be read: {error}") from None


@lru_cache(32)
def _compile_template(source: str, special_tokens: tuple[tuple[str, str], ...]) -> ChatTemplate:
    from neso.engine.text.chat_template import ChatTemplate

    return ChatTemplate(source, dict(special_tokens))


def _called_models(model: Model) -> list[str]:
    called = [step.model_name for step in model.config.ensemble_scheduling.step]
    if name := string_parameter(model.config, _CALLED_MODEL_PARAMETER):
        called += [_PREPROCESSING, name]
    return called

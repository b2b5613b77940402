"""The tokenizers of models that have none of their own face: where they are, and how long a prompt may be."""

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
from neso.frontends.openai.tensor_models.language_model import NO_LIMIT
from neso.generation import InvalidParameter, TokenizerLike
from neso.generation.language_model import TokenBytes
from neso.server.config.model_config import string_parameter
from neso.server.errors import ServerError

if TYPE_CHECKING:
    from neso.engine.text.chat_template import ChatTemplate
    from neso.server.core import Core
    from neso.server.model import Model

logger = logging.getLogger(__name__)


class TemplatedText:
    """The `TokenizerLike` of a model with another chat template."""

    has_chat_template = True

    def __init__(self, tools: TokenizerLike, source: str) -> None:
        self._tools = tools
        self.chat_template_source = source

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return self._tools.encode(text, add_special_tokens=add_special_tokens)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return self._tools.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes | None:
        """See `TokenBytes`."""
        return self._tools.token_bytes(token_id) if isinstance(self._tools, TokenBytes) else None

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        special_tokens = getattr(self._tools, "special_tokens", None)
        texts = special_tokens.texts if special_tokens else {}
        return _template(self.chat_template_source, tuple(sorted(texts.items()))).render(
            messages, tools=tools, add_generation_prompt=add_generation_prompt, variables=variables
        )


@lru_cache(32)
def _template(source: str, special_tokens: tuple[tuple[str, str], ...]) -> ChatTemplate:
    """The template, which is compiled once for all requests."""
    from neso.engine.text.chat_template import ChatTemplate

    return ChatTemplate(source, dict(special_tokens))


class UnknownText(NoTokenizer):
    """The `TokenizerLike` of a model whose tokenizer nobody knows."""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        self._reject()

    def _reject(self) -> NoReturn:
        raise InvalidParameter("model", "no tokenizer is known for it, so it takes a prompt of text only")


UNKNOWN_TEXT = UnknownText()


def read_chat_template(given: str) -> str:
    """The template in a file, or the one that is given itself. Raises `ValueError`."""
    if "{{" in given or "{%" in given:
        return given
    try:
        return Path(given).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ValueError(f"the chat template '{given}' cannot be read: {error}") from None


_TOKENIZER = "tokenizer_dir"
_LIMITS = ("max_model_len", "max_seq_len")
_SCRIPTED = "tensorrt_llm_model_name"
"""The parameter that business logic in TensorRT-LLM's layout names its model by; it calls `preprocessing` as well."""
_PREPROCESSING = "preprocessing"


class ModelTexts:
    """Looks at a model's configuration, and at the models that it calls. `default` is for models without."""

    def __init__(self, core: Core, default: TokenizerLike | None) -> None:
        self._core = core
        self._default = default
        self._found: WeakKeyDictionary[Model, TokenizerLike] = WeakKeyDictionary()
        self._failed: WeakSet[Model] = WeakSet()

    async def tokenizer(self, model: Model) -> TokenizerLike | None:
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

    async def _find(self, model: Model) -> TokenizerLike | None:
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

    async def _load(self, model: Model, directory: str) -> TokenizerLike | None:
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


def open_tokenizer(name: str, near: Path | None = None) -> TokenizerLike:
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

"""Which model a request is for."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import orjson

from neso.frontends.openai.access.rate_limits import TOKENS_USED, metered
from neso.frontends.openai.errors import ApiError, invalid
from neso.frontends.openai.model_tokenizers import (
    UNKNOWN_TEXT,
    ModelTexts,
    TemplatedText,
    open_tokenizer,
    read_chat_template,
)
from neso.frontends.openai.tensor_models import (
    TensorLanguageModel,
    missing_for_text,
    takes_adapter,
    takes_adapter_number,
)
from neso.frontends.openai.tensor_models.language_model import NO_LIMIT
from neso.generation import LanguageModel, PoolingModel, SupportsLora, TokenizerLike
from neso.generation.pooling import pool_all
from neso.generation.request import TASK_PREFIX
from neso.server.errors import NotFound, Unavailable
from neso.server.metadata import ModelState

if TYPE_CHECKING:
    from neso.frontends.openai_options import OpenAIOptions
    from neso.generation import GenerationOutput, GenerationRequest, PooledOutput, PoolingRequest
    from neso.server.core import Core
    from neso.server.model import Model
    from neso.server.tracing import Trace

logger = logging.getLogger(__name__)


_FILE = "multi_lora.json"


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter of a model: its name, and what the model is told."""

    model: Model
    name: str
    told: str


class AdapterNames:
    """What adapters models have: what their text face lists, or the file multi_lora.json beside a model of tensors.

    That holds names with paths, as for Triton's vLLM backend, or with the numbers that TensorRT-LLM's models know the
    adapters by (`lora_task_id`).
    """

    def __init__(self) -> None:
        self._files: WeakKeyDictionary[Model, dict[str, str]] = WeakKeyDictionary()

    def of(self, model: Model) -> list[Adapter]:
        """Those that are known by a name."""
        face = model.language_model
        if isinstance(face, SupportsLora):
            # One without a path is known to those who sent it, by its number.
            names = {name: name for name, path in face.list_loras().items() if path is not None}
        elif face is None and takes_adapter(model.signature) and not missing_for_text(model.signature):
            names = self._of_file(model)
        else:
            names = {}
        return [Adapter(model, name, told) for name, told in names.items()]

    def numbered(self, model: Model, number: str) -> Adapter | None:
        """The adapter that a model knows by a number, if it can know any so."""
        face = model.language_model
        if not number.isdecimal():
            return None
        if isinstance(face, SupportsLora):
            told = f"{TASK_PREFIX}{number}"
            return Adapter(model, number, told) if told in face.list_loras() else None
        by_number = face is None and takes_adapter_number(model.signature)
        return Adapter(model, number, number) if by_number else None

    def _of_file(self, model: Model) -> dict[str, str]:
        found = self._files.get(model)
        if found is None:
            found = self._files[model] = _read(model.version_directory / _FILE)
        return found


def _read(path: Path) -> dict[str, str]:
    """What a model is told, by the names in a file; nothing for one that is not there or cannot be used."""
    try:
        content = orjson.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, orjson.JSONDecodeError) as error:
        logger.error("%s cannot be read: %s", path, error)
        return {}
    if not isinstance(content, dict):
        logger.error("%s must hold an object of names", path)
        return {}
    return {name: _told(name, value) for name, value in content.items()}


def _told(name: str, value: Any) -> str:
    return str(value) if isinstance(value, int) else name


@dataclass(frozen=True, slots=True)
class Target:
    """A model of the server, its text face, its tokenizer and template, and the adapter that is meant, "" for none."""

    model: Model
    language_model: LanguageModel
    text: TokenizerLike
    adapter: str = ""

    @property
    def tells_tokens(self) -> bool:
        """Whether the tokens of its text are known, and not the text alone."""
        return not isinstance(self.language_model, TensorLanguageModel)

    def generate(
        self, request: GenerationRequest, trace: Trace | None = None
    ) -> AsyncGenerator[GenerationOutput, None]:
        """Generate text, as `LanguageModel.generate` does."""
        if isinstance(self.language_model, TensorLanguageModel):
            return metered(self.language_model.generate(request, trace))
        return metered(self.model.generate(request, trace))


@dataclass(frozen=True, slots=True)
class PoolingTarget:
    """A model of the server, and its face for vectors."""

    model: Model
    pooling_model: PoolingModel

    async def pool(self, requests: Sequence[PoolingRequest]) -> list[PooledOutput]:
        """The vectors of all of them, in their order. Raises as `Model.pool`."""
        pooled = await pool_all(self.model.pool, requests)
        tell = TOKENS_USED.get()
        if tell is not None:
            tell(sum(output.num_prompt_tokens for output in pooled))
        return pooled


class Targets:
    """The models of a core that take text, and their adapters, by the names that clients give them."""

    def __init__(self, core: Core, options: OpenAIOptions) -> None:
        """Raises `ValueError` for a tokenizer or a chat template that cannot be read."""
        self._core = core
        self._options = options
        self._adapter_names = AdapterNames()
        self._template = read_chat_template(options.chat_template) if options.chat_template else ""
        self._texts = ModelTexts(core, open_tokenizer(options.tokenizer) if options.tokenizer else None)

    async def find(self, name: str) -> Target:
        """The language model of that name, or the one with that adapter, `model:adapter` where several have it.

        Raises `ApiError` and `ServerError`.
        """
        try:
            model = self._find(name)
        except ApiError:
            adapter = self.adapter(name)
            if adapter is None:
                raise
            return await self._target(adapter.model, adapter.told)
        return await self._target(model)

    async def _target(self, model: Model, adapter: str = "") -> Target:
        language_model = model.language_model
        if language_model is not None:
            return Target(model, language_model, self._templated(language_model.text), adapter)
        _check_text_face(model)
        tokenizer = await self._texts.tokenizer(model)
        text = self._templated(tokenizer or UNKNOWN_TEXT)
        face = TensorLanguageModel(
            model, text, tokenizer, self._texts.max_model_len(model), self._options.default_max_tokens
        )
        return Target(model, face, text, adapter)

    def _templated(self, text: TokenizerLike) -> TokenizerLike:
        return TemplatedText(text, self._template) if self._template else text

    def find_pooling(self, name: str) -> PoolingTarget:
        """The model of that name, which gives vectors. Raises `ApiError` and `ServerError`."""
        model = self._find(name)
        pooling_model = model.pooling_model
        if pooling_model is None or pooling_model.pooling is None:
            raise invalid("model", f"The model '{name}' gives no embeddings or scores.")
        return PoolingTarget(model, pooling_model)

    def find_text_model(self, name: str) -> Model:
        """The model of that name, if it takes text. Raises as the others do."""
        model = self._find(name)
        if model.language_model is None and model.pooling_model is None:
            _check_text_face(model)
        return model

    def text_models(self) -> list[Model]:
        """The models that are ready and take text, by name."""
        found = {}
        for model in self._core.models():
            takes_text = model.language_model or model.pooling_model or not missing_for_text(model.signature)
            if takes_text and model.ready():
                found[model.name] = model
        return [found[name] for name in sorted(found)]

    def told_limit(self, model: Model) -> int | None:
        """Most tokens of prompt and answer together, as clients are told; None where nobody knows."""
        face = model.language_model or model.pooling_model
        limit = self._texts.max_model_len(model) if face is None else face.max_model_len
        return None if limit >= NO_LIMIT else limit

    def adapters(self) -> dict[str, Adapter]:
        """The adapters of all models, as `model:adapter`, and by their own names where these are unambiguous."""
        found: dict[str, Adapter] = {}
        ambiguous: set[str] = set()
        for model in self.text_models():
            for adapter in self._adapter_names.of(model):
                ambiguous |= {adapter.name} & found.keys()
                full_name = f"{model.name}{self._options.lora_separator}{adapter.name}"
                found[adapter.name] = found[full_name] = adapter
        return {name: adapter for name, adapter in found.items() if name not in ambiguous}

    def adapter(self, name: str) -> Adapter | None:
        """The adapter that a name means, unless it is that of a model or of nothing."""
        return self.adapters().get(name) or self._numbered(name)

    def _numbered(self, name: str) -> Adapter | None:
        """The adapter `model:7`, for models that know theirs by numbers."""
        base, separator, number = name.rpartition(self._options.lora_separator)
        models = [model for model in self.text_models() if separator and model.name == base]
        return self._adapter_names.numbered(models[0], number) if models else None

    def _find(self, name: str) -> Model:
        try:
            return self._core.model(name)
        except (NotFound, Unavailable) as error:
            if not self._core.live() or self._is_loading(name):
                raise  # it is worth trying again
            what = "does not exist" if isinstance(error, NotFound) else "is not loaded"
            raise ApiError(
                404, f"The model '{name}' {what}.", param="model", code="model_not_found"
            ) from None

    def _is_loading(self, name: str) -> bool:
        return any(
            entry.name == name and entry.state is ModelState.LOADING
            for entry in self._core.repository_index()
        )


def _check_text_face(model: Model) -> None:
    """Raises `ApiError` for a model that cannot be asked for text."""
    missing = missing_for_text(model.signature)
    if model.pooling_model is not None:
        missing = "it gives vectors"
    if missing:
        raise invalid(
            "model",
            f"The model '{model.name}' is not a language model, it cannot generate text: {missing}.",
        )

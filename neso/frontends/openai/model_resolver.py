"""Resolution of model names in requests: language models, LoRA adapters, and pooling models."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import orjson

from neso.frontends.openai.access.rate_limits import TOKENS_USED, metered
from neso.frontends.openai.errors import UnknownModel, invalid
from neso.frontends.openai.model_tokenizers import (
    MISSING_TOKENIZER,
    ChatTemplateOverride,
    ModelTokenizers,
    open_tokenizer,
    read_chat_template,
)
from neso.frontends.openai.tensor_models.language_model import TensorLanguageModel
from neso.frontends.openai.tensor_models.request_tensors import (
    accepts_adapter,
    accepts_adapter_number,
    unsupported_reason,
)
from neso.generation import UNLIMITED_LENGTH, LanguageModel, PoolingModel, SupportsLora, TokenizerLike
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

_LORA_FILE = "multi_lora.json"


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """A model for text generation, with its tokenizer and chat template. `lora_name`: adapter, "" for none."""

    model: Model
    language_model: LanguageModel
    tokenizer: TokenizerLike
    lora_name: str = ""

    @property
    def has_token_ids(self) -> bool:
        """Whether outputs have token ids, not only text."""
        return not isinstance(self.language_model, TensorLanguageModel)

    def generate(
        self, request: GenerationRequest, trace: Trace | None = None
    ) -> AsyncGenerator[GenerationOutput, None]:
        """Generate text like `LanguageModel.generate`. Tokens count against the client's rate limit."""
        if isinstance(self.language_model, TensorLanguageModel):
            return metered(self.language_model.generate(request, trace))
        return metered(self.model.generate(request, trace))


@dataclass(frozen=True, slots=True)
class ResolvedPoolingModel:
    """A model for embeddings or scores."""

    model: Model
    pooling_model: PoolingModel

    async def pool(self, requests: Sequence[PoolingRequest]) -> list[PooledOutput]:
        """Return results in the order of `requests`. Raises like `Model.pool`. Tokens count against the rate limit."""
        self.model.admission.reserve(len(requests))
        pooled = await pool_all(self.model.pool, requests)
        report = TOKENS_USED.get()
        if report is not None:
            report(sum(output.num_prompt_tokens for output in pooled))
        return pooled

    def label(self, index: int) -> str:
        """Return the name of a class; Hugging Face's default if the model has none."""
        info = self.pooling_model.pooling
        labels = [] if info is None else info.labels
        return labels[index] if index < len(labels) else f"LABEL_{index}"


@dataclass(frozen=True, slots=True)
class Adapter:
    """A LoRA adapter of `model`. `lora_name`: its name in the model."""

    model: Model
    name: str
    lora_name: str


class ModelResolver:
    """Finds the models and adapters of a core by client-facing name."""

    def __init__(self, core: Core, options: OpenAIOptions) -> None:
        """Raises `ValueError` for a tokenizer or a chat template that cannot be read."""
        self._core = core
        self._options = options
        self._adapter_files: WeakKeyDictionary[Model, dict[str, str]] = WeakKeyDictionary()
        self._template = read_chat_template(options.chat_template) if options.chat_template else ""
        default = open_tokenizer(options.tokenizer) if options.tokenizer else None
        self._tokenizers = ModelTokenizers(core, default)

    async def find(self, name: str) -> ResolvedModel:
        """Return the language model or adapter of that name (`model:adapter` if several models have such an adapter).

        Raises `ApiError` and `ServerError`.
        """
        lora_name = ""
        try:
            model = self._find(name)
        except UnknownModel:
            adapter = self.adapter(name)
            if adapter is None:
                self._check_has_adapters(name)
                raise
            model, lora_name = adapter.model, adapter.lora_name
        language_model = model.language_model
        if language_model is not None:
            return ResolvedModel(model, language_model, self._with_template(language_model.text), lora_name)
        _check_generates_text(model)
        own = await self._tokenizers.find(model)
        tokenizer = self._with_template(own or MISSING_TOKENIZER)
        max_model_len = self._tokenizers.max_model_len(model)
        language_model = TensorLanguageModel(
            model, tokenizer, own, max_model_len, self._options.default_max_tokens
        )
        return ResolvedModel(model, language_model, tokenizer, lora_name)

    def find_pooling(self, name: str) -> ResolvedPoolingModel:
        """Return the pooling model of that name. Raises `ApiError` and `ServerError`."""
        model = self._find(name)
        pooling_model = model.pooling_model
        if pooling_model is None or pooling_model.pooling is None:
            raise invalid("model", f"The model '{name}' does not support embeddings or scores.")
        return ResolvedPoolingModel(model, pooling_model)

    def find_model(self, name: str) -> Model:
        """Return the model of that name. Raises `ApiError` and `ServerError`."""
        return self._find(name)

    def find_text_model(self, name: str) -> Model:
        """Return the model of that name if it accepts text. Raises `ApiError` and `ServerError`."""
        model = self._find(name)
        if model.language_model is None and model.pooling_model is None:
            _check_generates_text(model)
        return model

    def text_models(self) -> list[Model]:
        """Return the ready models that accept text, by name."""
        return [
            model
            for model in self.ready_models()
            if model.language_model or model.pooling_model or not unsupported_reason(model.signature)
        ]

    def ready_models(self) -> list[Model]:
        """Return the ready models by name, each in its latest version."""
        found = {model.name: model for model in self._core.models() if model.ready()}
        return [found[name] for name in sorted(found)]

    def max_model_len(self, model: Model) -> int | None:
        """Maximum tokens of prompt and output together; None if unknown."""
        served = model.language_model or model.pooling_model
        limit = self._tokenizers.max_model_len(model) if served is None else served.max_model_len
        return None if limit >= UNLIMITED_LENGTH else limit

    def adapters(self) -> dict[str, Adapter]:
        """Return the adapters of all models as `model:adapter`, and by adapter name if it is unambiguous."""
        found: dict[str, Adapter] = {}
        ambiguous: set[str] = set()
        for model in self.text_models():
            for adapter in self._adapters_of(model):
                ambiguous |= {adapter.name} & found.keys()
                full_name = f"{model.name}{self._options.lora_separator}{adapter.name}"
                found[adapter.name] = found[full_name] = adapter
        return {name: adapter for name, adapter in found.items() if name not in ambiguous}

    def adapter(self, name: str) -> Adapter | None:
        """Return the adapter of that name, or the adapter `model:7` of a model with numbered adapters."""
        found = self.adapters().get(name)
        if found is not None:
            return found
        base, separator, number = name.rpartition(self._options.lora_separator)
        models = [model for model in self.text_models() if separator and model.name == base]
        return _numbered_adapter(models[0], number) if models else None

    def _adapters_of(self, model: Model) -> list[Adapter]:
        """Return the named adapters of a model: listed by the model, or in multi_lora.json of a tensor model."""
        language_model = model.language_model
        names: dict[str, str] = {}
        if isinstance(language_model, SupportsLora):
            # Adapters without a path were sent by clients and are addressed by number.
            names = {name: name for name, path in language_model.list_loras().items() if path is not None}
        elif (
            language_model is None
            and accepts_adapter(model.signature)
            and not unsupported_reason(model.signature)
        ):
            if model not in self._adapter_files:
                self._adapter_files[model] = _read_adapter_file(model.version_directory / _LORA_FILE)
            names = self._adapter_files[model]
        return [Adapter(model, name, lora_name) for name, lora_name in names.items()]

    def _with_template(self, tokenizer: TokenizerLike) -> TokenizerLike:
        return ChatTemplateOverride(tokenizer, self._template) if self._template else tokenizer

    def _find(self, name: str) -> Model:
        try:
            return self._core.model(name)
        except (NotFound, Unavailable) as error:
            if self._core.stopping or self._is_loading(name):
                raise  # 503: the client can retry
            problem = "does not exist" if isinstance(error, NotFound) else "is not loaded"
            raise UnknownModel(name, problem) from None

    def _check_has_adapters(self, name: str) -> None:
        """Raise `UnknownModel` for an unknown adapter `model:adapter` of a known model."""
        base, separator, adapter = name.rpartition(self._options.lora_separator)
        if separator and self._core.model_ready(base):
            raise UnknownModel(
                *(name, f"does not exist: model '{base}' has no adapter '{adapter}'"),
                f"Unknown LoRA: {adapter}; for model: {name}",
            ) from None

    def _is_loading(self, name: str) -> bool:
        return any(
            entry.name == name and entry.state is ModelState.LOADING
            for entry in self._core.repository_index()
        )


def _check_generates_text(model: Model) -> None:
    """Raise `ApiError` for a model without the tensors of a language model."""
    reason = unsupported_reason(model.signature)
    if model.pooling_model is not None:
        reason = "it returns embeddings or scores"
    if reason:
        raise invalid(
            "model",
            f"The model '{model.name}' is not a language model, it cannot generate text: {reason}.",
        )


def _numbered_adapter(model: Model, number: str) -> Adapter | None:
    if not number.isdecimal():
        return None
    if isinstance(model.language_model, SupportsLora):
        lora_name = f"{TASK_PREFIX}{number}"
        return Adapter(model, number, lora_name) if lora_name in model.language_model.list_loras() else None
    numbered = model.language_model is None and accepts_adapter_number(model.signature)
    return Adapter(model, number, number) if numbered else None


def _read_adapter_file(path: Path) -> dict[str, str]:
    """Read the adapters in a multi_lora.json, by name; empty if the file is missing or invalid.

    The values are paths, as for Triton's vLLM backend, or numbers (`lora_task_id`) of TensorRT-LLM models.
    """
    try:
        content = orjson.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, orjson.JSONDecodeError) as error:
        logger.error("%s cannot be read: %s", path, error)
        return {}
    if not isinstance(content, dict):
        logger.error("%s must contain a JSON object of names", path)
        return {}
    return {name: str(value) if isinstance(value, int) else name for name, value in content.items()}

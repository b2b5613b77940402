"""Which model a request is for."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from neso.frontends.openai.errors import ApiError, invalid
from neso.generation import AdaptableModel, LanguageModel, PoolingModel, TextTools
from neso.server.errors import NotFound

if TYPE_CHECKING:
    from neso.frontends.openai.options import OpenAIOptions
    from neso.generation import GenerationOutput, GenerationRequest
    from neso.server.core import Core
    from neso.server.model import Model
    from neso.server.tracing import Trace


@dataclass(frozen=True, slots=True)
class Target:
    """A model of the server, its text face, and the adapter that is meant, "" for none."""

    model: Model
    language_model: LanguageModel
    adapter: str = ""

    @property
    def text(self) -> TextTools:
        """The model's tokenizer and chat template."""
        return self.language_model.text

    def generate(
        self, request: GenerationRequest, trace: Trace | None = None
    ) -> AsyncGenerator[GenerationOutput, None]:
        """Generate text, as `LanguageModel.generate` does."""
        return self.model.generate(request, trace)


@dataclass(frozen=True, slots=True)
class PoolingTarget:
    """A model of the server, and its face for vectors."""

    model: Model
    pooling_model: PoolingModel


class Targets:
    """The models of a core that take text, and their adapters, by the names that clients give them."""

    def __init__(self, core: Core, options: OpenAIOptions) -> None:
        self._core = core
        self._options = options

    async def find(self, name: str) -> Target:
        """The language model of that name, or the one with that adapter, `model:adapter` where several have it.

        Raises `ApiError` and `ServerError`.
        """
        try:
            model = self._find(name)
        except ApiError:
            adapted = self.adapters().get(name)
            if adapted is None:
                raise
            return adapted
        language_model = model.language_model
        if language_model is None:
            raise _no_language_model(name)
        return Target(model, language_model)

    def find_pooling(self, name: str) -> PoolingTarget:
        """The model of that name, which gives vectors. Raises `ApiError` and `ServerError`."""
        model = self._find(name)
        pooling_model = model.pooling_model
        if pooling_model is None or pooling_model.pooling is None:
            raise invalid("model", f"The model '{name}' gives no embeddings or scores.")
        return PoolingTarget(model, pooling_model)

    def find_text_model(self, name: str) -> tuple[Model, int]:
        """The model of that name, if it takes text, and the most tokens that it takes. Raises as the others do."""
        model = self._find(name)
        face = model.language_model or model.pooling_model
        if face is None:
            raise _no_language_model(name)
        return model, face.max_model_len

    def text_models(self) -> list[tuple[Model, int]]:
        """The models that are ready and take text, by name, and the most tokens that each takes."""
        found = {}
        for model in self._core.models():
            face = model.language_model or model.pooling_model
            if face is not None and model.ready():
                found[model.name] = (model, face.max_model_len)
        return [found[name] for name in sorted(found)]

    def adapters(self) -> dict[str, Target]:
        """The adapters of all models, as `model:adapter`, and by their own names where these are unambiguous."""
        found: dict[str, Target] = {}
        ambiguous: set[str] = set()
        for model, _ in self.text_models():
            language_model = model.language_model
            if language_model is None or not isinstance(language_model, AdaptableModel):
                continue
            for name, path in language_model.list_loras().items():
                if path is None:
                    continue  # known to those who sent it, by its number
                ambiguous |= {name} & found.keys()
                found[name] = found[f"{model.name}:{name}"] = Target(model, language_model, name)
        return {name: target for name, target in found.items() if name not in ambiguous}

    def _find(self, name: str) -> Model:
        try:
            return self._core.model(name)
        except NotFound:
            raise ApiError(
                404, f"The model '{name}' does not exist.", param="model", code="model_not_found"
            ) from None


def _no_language_model(name: str) -> ApiError:
    return invalid("model", f"The model '{name}' is not a language model: it cannot generate text.")

"""Which model a request is for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from neso.frontends.openai.errors import ApiError, invalid
from neso.generation import LanguageModel
from neso.server.errors import NotFound

if TYPE_CHECKING:
    from neso.server.core import Core
    from neso.server.model import Model


@dataclass(frozen=True, slots=True)
class Target:
    """A model of the server, and its text face."""

    model: Model
    language_model: LanguageModel


def find_target(core: Core, name: str) -> Target:
    """The language model of that name. Raises `ApiError` and `ServerError`."""
    try:
        model = core.model(name)
    except NotFound:
        raise ApiError(
            404, f"The model '{name}' does not exist.", param="model", code="model_not_found"
        ) from None
    language_model = model.language_model
    if language_model is None:
        raise invalid("model", f"The model '{name}' is not a language model: it cannot generate text.")
    return Target(model, language_model)


def language_models(core: Core) -> list[Target]:
    """The language models that are ready, by name."""
    targets: dict[str, Target] = {}
    for model in core.models():
        if model.language_model is not None and model.ready():
            targets[model.name] = Target(model, model.language_model)
    return [targets[name] for name in sorted(targets)]

"""The list of models."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from neso.frontends.openai.targets import Target, find_target, language_models

if TYPE_CHECKING:
    from neso.server.core import Core


class ModelsApi:
    """`GET /v1/models` and `GET /v1/models/{model}`."""

    def __init__(self, core: Core, created: int) -> None:
        self._core = core
        self._created = created

    def list_all(self) -> dict[str, Any]:
        """Every model that can generate text."""
        return {"object": "list", "data": [self._card(target) for target in language_models(self._core)]}

    def one(self, name: str) -> dict[str, Any]:
        """One model. Raises `ApiError`."""
        return self._card(find_target(self._core, name))

    def _card(self, target: Target) -> dict[str, Any]:
        return {
            "id": target.model.name,
            "object": "model",
            "created": self._created,
            "owned_by": "neso",
            "max_model_len": target.language_model.max_model_len,
        }

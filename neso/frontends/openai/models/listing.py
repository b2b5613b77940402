"""The list of models."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from neso.frontends.openai.models.adapter_names import Adapter
from neso.frontends.openai.models.targets import Targets

if TYPE_CHECKING:
    from neso.server.model import Model


class ModelsApi:
    """`GET /v1/models` and `GET /v1/models/{model}`."""

    def __init__(self, targets: Targets, created: int) -> None:
        self._targets = targets
        self._created = created

    def list_all(self) -> dict[str, Any]:
        """Every model that takes text, and every adapter by its shortest name."""
        cards = [self._card(model) for model in self._targets.text_models()]
        known = self._targets.adapters()
        for name, adapter in known.items():
            if name == adapter.name or adapter.name not in known:
                cards.append(self._adapter_card(name, adapter))
        return {"object": "list", "data": cards}

    def one(self, name: str) -> dict[str, Any]:
        """One model. Raises `ApiError`."""
        adapter = self._targets.adapter(name)
        if adapter is not None:
            return self._adapter_card(name, adapter)
        return self._card(self._targets.find_text_model(name))

    def _adapter_card(self, name: str, adapter: Adapter) -> dict[str, Any]:
        return {**self._card(adapter.model), "id": name, "root": adapter.name, "parent": adapter.model.name}

    def _card(self, model: Model) -> dict[str, Any]:
        return {
            "id": model.name,
            "object": "model",
            "created": self._created,
            "owned_by": "neso",
            "max_model_len": self._targets.told_limit(model),
            "root": model.name,
            "parent": None,
            "permission": [self._permission(model.name)],
        }

    def _permission(self, name: str) -> dict[str, Any]:
        """What clients of OpenAI's first API look for: that everybody may use the model."""
        return {
            "id": f"modelperm-{name}",
            "object": "model_permission",
            "created": self._created,
            "allow_create_engine": False,
            "allow_sampling": True,
            "allow_logprobs": True,
            "allow_search_indices": False,
            "allow_view": True,
            "allow_fine_tuning": False,
            "organization": "*",
            "group": None,
            "is_blocking": False,
        }

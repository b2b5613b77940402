"""Loading and unloading of adapters, as vLLM's server has it."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from neso.frontends.openai.errors import ApiError, invalid
from neso.frontends.openai.models.targets import Targets
from neso.generation import LoraRequest, SupportsLora


class LoadAdapterRequest(BaseModel):
    """The body of `POST /v1/load_lora_adapter`."""

    model_config = ConfigDict(protected_namespaces=())

    lora_name: str
    lora_path: str
    load_inplace: bool = False
    model: str | None = None


class UnloadAdapterRequest(BaseModel):
    """The body of `POST /v1/unload_lora_adapter`."""

    model_config = ConfigDict(protected_namespaces=(), extra="allow")

    lora_name: str
    model: str | None = None


class AdaptersApi:
    """`POST /v1/load_lora_adapter` and `POST /v1/unload_lora_adapter`, for models that allow it."""

    def __init__(self, targets: Targets) -> None:
        self._targets = targets

    async def load(self, request: LoadAdapterRequest) -> str:
        """Raises `ApiError` and `ServerError`."""
        name = request.lora_name
        model = self._model(request.model)
        if name in model.list_loras() and not request.load_inplace:
            raise invalid(
                "lora_name",
                f"The lora adapter '{name}' has already been loaded; 'load_inplace' loads it in its place.",
            )
        await model.load_lora(LoraRequest(name=name, path=request.lora_path))
        return f"Success: LoRA adapter '{name}' added successfully."

    async def unload(self, request: UnloadAdapterRequest) -> str:
        """Raises `ApiError` and `ServerError`."""
        name = request.lora_name
        model = self._model(request.model)
        if name not in model.list_loras():
            raise ApiError(404, f"The lora adapter '{name}' cannot be found.", param="lora_name")
        await model.unload_lora(name)
        return f"Success: LoRA adapter '{name}' removed successfully."

    def _model(self, name: str | None) -> SupportsLora:
        """The model of that name, or the only one that allows it."""
        allowed: dict[str, SupportsLora] = {}
        for model in self._targets.text_models():
            face = model.language_model
            if isinstance(face, SupportsLora) and face.allows_runtime_lora:
                allowed[model.name] = face
        if name is None and len(allowed) == 1:
            return next(iter(allowed.values()))
        if name is None and allowed:
            raise invalid("model", f"'model' must say which one is meant of {', '.join(sorted(allowed))}.")
        if name not in allowed:
            raise ApiError(
                403, "No adapters can be loaded or unloaded here: see the option allow_runtime_lora."
            )
        return allowed[name]

"""Routes for those who run the server: loading models, metrics."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING, Any

import orjson
from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from neso.frontends.openai.errors import ApiError, invalid
from neso.frontends.openai.model_resolver import Adapter, Targets
from neso.frontends.openai.routing import answer_to_body
from neso.generation import LoraRequest, SupportsLora
from neso.server.errors import ErrorCode, ServerError
from neso.server.metrics.registry import CONTENT_TYPE
from neso.server.options import ModelControlMode
from neso.server.repository.names import check_model_name

if TYPE_CHECKING:
    from neso.server.core import Core
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


class LoadModelRequest(BaseModel):
    """The body of a load, which may be left out."""

    model_config = ConfigDict(extra="forbid")

    config: dict[str, Any] | str | None = Field(
        None, description="In place of the repository's config.pbtxt, as an object or its text."
    )


class UnloadModelRequest(BaseModel):
    """The body of an unload, which may be left out."""

    model_config = ConfigDict(extra="forbid")

    unload_dependents: bool = Field(False, description="The models of an ensemble's steps go with it.")


class ModelControlApi:
    """Loads models of the repository, and unloads them. `created` is what the answers say."""

    def __init__(self, core: Core, created: int) -> None:
        self._core = core
        self._created = created
        self._loading: set[str] = set()

    async def load(self, name: str, request: LoadModelRequest) -> dict[str, Any]:
        """Load a model; one that is loaded, only with another configuration. Raises `ApiError` and `ServerError`."""
        self._check(name)
        if name in self._loading or (request.config is None and self._core.model_ready(name)):
            raise invalid("model", f"The model '{name}' is already loaded.")
        config = request.config
        self._loading.add(name)
        try:
            await self._core.load_model(
                name, orjson.dumps(config).decode() if isinstance(config, dict) else config
            )
        except ServerError as error:
            raise self._explain(name, error) from None
        finally:
            self._loading.discard(name)
        card = {"id": name, "object": "model", "created": self._created, "owned_by": "neso"}
        return {"status": "success", "model": name, **card}

    async def unload(self, name: str, request: UnloadModelRequest) -> dict[str, Any]:
        """Unload a model once its requests in flight have ended. Raises as `load`."""
        self._check(name)
        if not self._core.model_ready(name):
            raise invalid("model", f"Unknown model: '{name}' is not loaded.")
        await self._core.unload_model(name, request.unload_dependents)
        return {"status": "success", "model": name}

    def _check(self, name: str) -> None:
        if self._core.options.model_control_mode is not ModelControlMode.EXPLICIT:
            raise ApiError(400, "Model load/unload requires --model-control-mode=explicit.")
        try:
            check_model_name(name)
        except ServerError as error:
            raise invalid("model", error.message) from None

    def _explain(self, name: str, error: ServerError) -> Exception:
        """The core says of a model that is nowhere what Triton's does: that something inside went wrong."""
        known = any(entry.name == name for entry in self._core.repository_index())
        if error.code is ErrorCode.INTERNAL and not known:
            return ApiError(
                404,
                f"The model '{name}' does not exist: {error.message}",
                param="model",
                code="model_not_found",
            )
        if error.code is ErrorCode.INTERNAL:
            return ApiError(400, error.message, param="model", code="model_load_failed")
        return error


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


def control_routes(core: Core, max_body_size: int) -> list[Route]:
    """`POST /v1/models/{model}/load` and `/unload`."""
    api = ModelControlApi(core, created=int(time.time()))

    async def load(request: Request) -> Response:
        change = partial(api.load, request.path_params["model"])
        return await answer_to_body(request, LoadModelRequest, change, max_body_size, empty=b"{}")

    async def unload(request: Request) -> Response:
        change = partial(api.unload, request.path_params["model"])
        return await answer_to_body(request, UnloadModelRequest, change, max_body_size, empty=b"{}")

    return [
        Route("/v1/models/{model:path}/load", load, methods=["POST"]),
        Route("/v1/models/{model:path}/unload", unload, methods=["POST"]),
    ]


def metrics_route(core: Core) -> Route:
    """`GET /metrics`, as on the port of the metrics."""

    async def metrics(request: Request) -> Response:
        return Response(await core.render_metrics(), headers={"content-type": CONTENT_TYPE})

    return Route("/metrics", metrics, methods=["GET"])

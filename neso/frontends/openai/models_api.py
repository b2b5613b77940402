"""`/v1/models`: list, load and unload models; load and unload LoRA adapters."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Any, Literal

import orjson
from pydantic import BaseModel, ConfigDict, Field
from typing_extensions import NotRequired, TypedDict

from neso.frontends.openai.errors import ApiError, invalid
from neso.frontends.openai.model_resolver import Adapter, ModelResolver
from neso.frontends.openai.routing import TEXT, Parameter, RequestContext, operation
from neso.frontends.openai.schemas import open_object
from neso.generation import LoraRequest, SupportsLora
from neso.server.errors import ErrorCode, ServerError
from neso.server.options import ModelControlMode
from neso.server.repository.names import check_model_name

if TYPE_CHECKING:
    from neso.server.core import Core
    from neso.server.model import Model

_TAG = "Models"
_GROUP = "model-repository"
_MODEL = Parameter("model", "path", {"type": "string"}, "Name of a model or of an adapter.")


@open_object
class ModelCard(TypedDict):
    """A model, or a LoRA adapter."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: NotRequired[
        Annotated[int | None, Field(description="Extension: maximum tokens of prompt and output together.")]
    ]
    root: NotRequired[str | None]
    parent: NotRequired[Annotated[str | None, Field(description="Extension: the base model of an adapter.")]]
    permission: NotRequired[list[dict[str, Any]]]


@open_object
class ModelList(TypedDict):
    """The models that accept text, and their adapters."""

    object: Literal["list"]
    data: list[ModelCard]


class LoadModelRequest(BaseModel):
    """The optional body of a load."""

    model_config = ConfigDict(extra="forbid")

    config: dict[str, Any] | str | None = Field(
        None, description="Replaces the repository's config.pbtxt, as an object or as JSON text."
    )


@open_object
class LoadModelResponse(TypedDict):
    """A model was loaded."""

    status: Literal["success"]
    model: str
    id: str
    object: Literal["model"]
    created: int
    owned_by: str


class UnloadModelRequest(BaseModel):
    """The optional body of an unload."""

    model_config = ConfigDict(extra="forbid")

    unload_dependents: bool = Field(False, description="Also unload the composing models of an ensemble.")


@open_object
class UnloadModelResponse(TypedDict):
    """A model was unloaded."""

    status: Literal["success"]
    model: str


class LoadLoraAdapterRequest(BaseModel):
    """The body of `POST /v1/load_lora_adapter`."""

    model_config = ConfigDict(protected_namespaces=())

    lora_name: str
    lora_path: str
    load_inplace: bool = False
    model: str | None = None


class UnloadLoraAdapterRequest(BaseModel):
    """The body of `POST /v1/unload_lora_adapter`."""

    model_config = ConfigDict(protected_namespaces=(), extra="allow")

    lora_name: str
    model: str | None = None


class ModelsApi:
    """`GET /v1/models` and `GET /v1/models/{model}`.

    `like_triton`: also list models that do not accept text, and adapters as `model:adapter`.
    """

    def __init__(self, resolver: ModelResolver, *, like_triton: bool = False) -> None:
        self._resolver = resolver
        self._like_triton = like_triton
        self._created = int(time.time())

    @operation("GET", "/v1/models", tag=_TAG, response=ModelList, errors=(500,), group=_GROUP)
    async def list_models(self, context: RequestContext) -> ModelList:
        """List the models that accept text."""
        models = self._resolver.ready_models() if self._like_triton else self._resolver.text_models()
        cards = [self._card(model) for model in models]
        known = self._resolver.adapters()
        for name, adapter in known.items():
            # Under its adapter name if that is unambiguous; in Triton with the name of the model.
            if (
                (name != adapter.name)
                if self._like_triton
                else (name == adapter.name or adapter.name not in known)
            ):
                cards.append(self._adapter_card(name, adapter))
        return {"object": "list", "data": cards}

    @operation(
        "GET",
        "/v1/models/{model:path}",
        tag=_TAG,
        response=ModelCard,
        parameters=(_MODEL,),
        errors=(400, 404, 500, 503),
        group=_GROUP,
    )
    async def get_model(self, context: RequestContext) -> ModelCard:
        """Get a model."""
        name = context.path_params["model"]
        adapter = self._resolver.adapter(name)
        if adapter is not None:
            return self._adapter_card(name, adapter)
        find = self._resolver.find_model if self._like_triton else self._resolver.find_text_model
        return self._card(find(name))

    def _adapter_card(self, name: str, adapter: Adapter) -> ModelCard:
        card = self._card(adapter.model)
        card["id"], card["root"], card["parent"] = name, adapter.name, adapter.model.name
        return card

    def _card(self, model: Model) -> ModelCard:
        # Early OpenAI clients require a permission that allows sampling.
        permission = {
            "id": f"modelperm-{model.name}",
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
        return {
            "id": model.name,
            "object": "model",
            "created": self._created,
            "owned_by": "neso",
            "max_model_len": self._resolver.max_model_len(model),
            "root": model.name,
            "parent": None,
            "permission": [permission],
        }


class ModelControlApi:
    """`POST /v1/models/{model}/load` and `/unload`, in model control mode explicit."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._created = int(time.time())
        self._loading: set[str] = set()
        self._unloading: set[str] = set()

    @operation(
        "POST",
        "/v1/models/{model:path}/load",
        tag=_TAG,
        request=LoadModelRequest,
        response=LoadModelResponse,
        parameters=(_MODEL,),
        errors=(400, 404, 409, 413, 415, 500, 503),
        body_required=False,
        group=_GROUP,
    )
    async def load(self, request: LoadModelRequest, context: RequestContext) -> LoadModelResponse:
        """Load a model of the repository, in model control mode explicit.

        A loaded model can be loaded again only with another configuration.
        """
        name = context.path_params["model"]
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
            raise self._load_error(name, error) from None
        finally:
            self._loading.discard(name)
        return {
            "status": "success",
            "model": name,
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "neso",
        }

    @operation(
        "POST",
        "/v1/models/{model:path}/unload",
        tag=_TAG,
        request=UnloadModelRequest,
        response=UnloadModelResponse,
        parameters=(_MODEL,),
        errors=(400, 404, 413, 415, 500, 503),
        body_required=False,
        group=_GROUP,
    )
    async def unload(self, request: UnloadModelRequest, context: RequestContext) -> UnloadModelResponse:
        """Unload a model, in model control mode explicit.

        Waits for its requests in flight.
        """
        name = context.path_params["model"]
        self._check(name)
        if name in self._unloading or not self._core.model_ready(name):
            raise invalid("model", f"Unknown model: '{name}' is not loaded.")
        self._unloading.add(name)
        try:
            await self._core.unload_model(name, request.unload_dependents)
        finally:
            self._unloading.discard(name)
        return {"status": "success", "model": name}

    def _check(self, name: str) -> None:
        if self._core.options.model_control_mode is not ModelControlMode.EXPLICIT:
            raise ApiError(400, "Model load/unload requires --model-control-mode=explicit.")
        try:
            check_model_name(name)
        except ServerError as error:
            raise invalid("model", error.message) from None

    def _load_error(self, name: str, error: ServerError) -> Exception:
        """Map the core's internal errors for unknown models and failed loads, as in Triton, to 404 and 400."""
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


class LoraAdaptersApi:
    """`POST /v1/load_lora_adapter` and `/v1/unload_lora_adapter`, as in vLLM's server."""

    def __init__(self, resolver: ModelResolver) -> None:
        self._resolver = resolver

    @operation(
        "POST",
        "/v1/load_lora_adapter",
        tag=_TAG,
        request=LoadLoraAdapterRequest,
        response=TEXT,
        errors=(400, 403, 404, 409, 413, 415, 500, 503),
        group=_GROUP,
    )
    async def load(self, request: LoadLoraAdapterRequest, context: RequestContext) -> str:
        """Load a LoRA adapter."""
        name = request.lora_name
        model = self._find_model(request.model)
        if name in model.list_loras() and not request.load_inplace:
            raise invalid(
                "lora_name",
                f"The lora adapter '{name}' has already been loaded; 'load_inplace' loads it in its place.",
            )
        await model.load_lora(LoraRequest(name=name, path=request.lora_path))
        return f"Success: LoRA adapter '{name}' added successfully."

    @operation(
        "POST",
        "/v1/unload_lora_adapter",
        tag=_TAG,
        request=UnloadLoraAdapterRequest,
        response=TEXT,
        errors=(400, 403, 404, 413, 415, 500, 503),
        group=_GROUP,
    )
    async def unload(self, request: UnloadLoraAdapterRequest, context: RequestContext) -> str:
        """Unload a LoRA adapter."""
        name = request.lora_name
        model = self._find_model(request.model)
        if name not in model.list_loras():
            raise ApiError(404, f"The lora adapter '{name}' cannot be found.", param="lora_name")
        await model.unload_lora(name)
        return f"Success: LoRA adapter '{name}' removed successfully."

    def _find_model(self, name: str | None) -> SupportsLora:
        """Return the model of that name; default: the only model that allows loading at runtime. Raises `ApiError`."""
        allowed: dict[str, SupportsLora] = {}
        for model in self._resolver.text_models():
            language_model = model.language_model
            if isinstance(language_model, SupportsLora) and language_model.allows_runtime_lora:
                allowed[model.name] = language_model
        if name is None and len(allowed) == 1:
            return next(iter(allowed.values()))
        if name is None and allowed:
            raise invalid("model", f"'model' must name one of: {', '.join(sorted(allowed))}.")
        if name not in allowed:
            raise ApiError(
                403, "No adapters can be loaded or unloaded here: see the option allow_runtime_lora."
            )
        return allowed[name]

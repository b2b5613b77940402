"""`POST /v1/models/{model}/load` and `/unload`, in model control mode explicit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import orjson
from pydantic import BaseModel, ConfigDict, Field

from neso.frontends.openai.errors import ApiError, invalid
from neso.server.errors import ErrorCode, ServerError
from neso.server.options import ModelControlMode
from neso.server.repository.names import check_model_name

if TYPE_CHECKING:
    from neso.server.core import Core


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

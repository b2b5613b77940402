"""What the server tells about itself and its models."""

from __future__ import annotations

from typing import Any

from neso.frontends.transport.http1 import Request, Response, json_response
from neso.server.config.model_config import config_to_dict
from neso.server.core import Core
from neso.server.metadata import TensorMetadata
from neso.server.model import Model


class MetadataEndpoints:
    """`GET /v2`, and a model's metadata, config and stats."""

    def __init__(self, core: Core) -> None:
        self._core = core

    def server(self, request: Request) -> Response:
        metadata = self._core.metadata()
        return json_response(
            {"name": metadata.name, "version": metadata.version, "extensions": metadata.extensions}
        )

    def model(self, request: Request) -> Response:
        metadata = self._model(request).metadata()
        return json_response(
            {
                "name": metadata.name,
                "versions": metadata.versions,
                "platform": metadata.platform,
                "inputs": [_tensor(tensor) for tensor in metadata.inputs],
                "outputs": [_tensor(tensor) for tensor in metadata.outputs],
            }
        )

    def config(self, request: Request) -> Response:
        return json_response(config_to_dict(self._model(request).config))

    def model_stats(self, request: Request) -> Response:
        """Of one version, or of all that are ready when none is named."""
        model = self._model(request)
        if "version" in request.params:
            return _stats([model])
        return _stats([self._core.model(model.name, version) for version in model.versions])

    def stats(self, request: Request) -> Response:
        return _stats(self._core.models())

    def _model(self, request: Request) -> Model:
        return self._core.model(request.params["model"], request.params.get("version", ""))


def _tensor(tensor: TensorMetadata) -> dict[str, Any]:
    return {"name": tensor.name, "datatype": tensor.datatype, "shape": tensor.shape}


def _stats(models: list[Model]) -> Response:
    return json_response({"model_stats": [model.statistics.snapshot() for model in models]})

"""The model repository extension: index, load, unload."""

from __future__ import annotations

import base64
import binascii
from typing import Any

from neso.frontends.kserve_http.json_body import read_optional_object
from neso.frontends.kserve_http.parameters import read_bool, read_object_member, read_string
from neso.frontends.transport.http1 import Request, Response, json_response
from neso.server.core import Core
from neso.server.errors import InvalidArgument, Unsupported
from neso.server.metadata import IndexEntry


class RepositoryEndpoints:
    """`POST /v2/repository/index` and `/v2/repository/models/{model}/load` and `/unload`."""

    def __init__(self, core: Core) -> None:
        self._core = core

    def index(self, request: Request) -> Response:
        _check_repository(request)
        ready = read_bool("ready", read_optional_object(request.body).get("ready", False))
        return json_response([_entry(entry) for entry in self._core.repository_index(ready)])

    async def load(self, request: Request) -> Response:
        _check_repository(request)
        config, files = _read_load(_parameters(request))
        await self._core.load_model(request.params["model"], config, files or None)
        return Response(b"", 200, None)

    async def unload(self, request: Request) -> Response:
        _check_repository(request)
        dependents = read_bool("unload_dependents", _parameters(request).get("unload_dependents", False))
        await self._core.unload_model(request.params["model"], dependents)
        return Response(b"", 200, None)


def _check_repository(request: Request) -> None:
    if "repository" in request.params:
        raise Unsupported("'repository_name' specification is not supported")


def _parameters(request: Request) -> dict[str, Any]:
    return read_object_member("parameters", read_optional_object(request.body).get("parameters", {}))


def _read_load(parameters: dict[str, Any]) -> tuple[str | None, dict[str, bytes]]:
    """The configuration and the files that are to replace those of the repository."""
    config: str | None = None
    files: dict[str, bytes] = {}
    for key, value in parameters.items():
        text = read_string(key, value)
        if key == "config":
            config = text
        elif key.startswith("file:"):
            try:
                files[key.removeprefix("file:")] = base64.b64decode(text, validate=True)
            except (binascii.Error, ValueError):
                raise InvalidArgument(f"load parameter '{key}' is not valid base64") from None
        else:
            raise InvalidArgument(f"unrecognized load parameter '{key}', expected 'config' or 'file:<path>'")
    return config, files


def _entry(entry: IndexEntry) -> dict[str, str]:
    """A row; a model that was never loaded has its name only."""
    row = {"name": entry.name}
    if entry.version:
        row["version"] = entry.version
    if entry.state is not None:
        row["state"] = entry.state.value
    if entry.reason:
        row["reason"] = entry.reason
    return row

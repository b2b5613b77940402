"""What the server tells about itself and its models."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class ModelState(str, Enum):
    """Where a model version is in its life; the values are those of the model repository extension."""

    LOADING = "LOADING"
    READY = "READY"
    UNLOADING = "UNLOADING"
    UNAVAILABLE = "UNAVAILABLE"


@dataclass(frozen=True, slots=True)
class ServerMetadata:
    """Name, version and the protocol extensions that are served."""

    name: str
    version: str
    extensions: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class TensorMetadata:
    """An input or an output. `datatype` is a KServe name; `shape` has -1 for each extent that varies."""

    name: str
    datatype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ModelMetadata:
    """What a client needs to know to write a request. `versions` are those that are ready."""

    name: str
    versions: list[str]
    platform: str
    inputs: list[TensorMetadata]
    outputs: list[TensorMetadata]


@dataclass(frozen=True, slots=True)
class IndexEntry:
    """A row of the repository index. A model that was never loaded has a name only (`state` None)."""

    name: str
    version: str = ""
    state: ModelState | None = None
    reason: str = ""

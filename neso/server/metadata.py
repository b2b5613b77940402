"""Server and model metadata."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class ModelState(str, Enum):
    """State of a model version, with the values of the model repository extension."""

    LOADING = "LOADING"
    READY = "READY"
    UNLOADING = "UNLOADING"
    UNAVAILABLE = "UNAVAILABLE"


@dataclass(frozen=True, slots=True)
class ServerMetadata:
    """Name, version and supported protocol extensions."""

    name: str
    version: str
    extensions: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class TensorMetadata:
    """An input or output. `datatype` is a KServe name; variable extents in `shape` are -1."""

    name: str
    datatype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ModelMetadata:
    """Model metadata of the KServe protocol. `versions`: the ready versions."""

    name: str
    versions: list[str]
    platform: str
    inputs: list[TensorMetadata]
    outputs: list[TensorMetadata]


@dataclass(frozen=True, slots=True)
class IndexEntry:
    """An entry of the repository index. `state` is None for a model that was never loaded."""

    name: str
    version: str = ""
    state: ModelState | None = None
    reason: str = ""

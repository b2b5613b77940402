"""Repository agents, which check or change a model's folder before the model is loaded."""

from __future__ import annotations

import hashlib
import importlib
import logging
from abc import ABC, abstractmethod
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from neso.server.errors import InvalidArgument, ServerError, Unsupported
from neso.server.repository.names import is_inside

logger = logging.getLogger(__name__)

BUILTIN = {"checksum": "neso.server.repository_agents:ChecksumAgent"}
ENTRY_POINT_GROUP = "neso.repository_agents"


class RepositoryAgent(ABC):
    """Base class of repository agents. Created for each load of a model, and kept while the model is loaded."""

    def __init__(self, parameters: dict[str, str]) -> None:
        self.parameters = parameters

    @abstractmethod
    def load(self, directory: Path) -> Path:
        """Check the model's folder and return it, or return another folder to load from. Runs in a thread.

        The agent owns the other folder and removes it when it is deleted (as a `TemporaryDirectory` attribute does).
        Raises `ServerError` to reject the model.
        """


def run_agents(config: Any, directory: Path) -> tuple[Path, tuple[RepositoryAgent, ...]]:
    """Run the agents of a configuration on a model's folder, in order. Blocks. Raises `ServerError`."""
    agents: list[RepositoryAgent] = []
    for entry in config.model_repository_agents.agents:
        agent = _find_agent(entry.name)(dict(entry.parameters))
        try:
            directory = Path(agent.load(directory))
        except ServerError as error:
            raise ServerError(f"repository agent '{entry.name}': {error.message}", error.code) from None
        except Exception as error:
            logger.exception("repository agent '%s' failed", entry.name)
            raise InvalidArgument(
                f"repository agent '{entry.name}' failed: {type(error).__name__}: {error}"
            ) from None
        agents.append(agent)
    return directory, tuple(agents)


def _find_agent(name: str) -> type[RepositoryAgent]:
    target = BUILTIN.get(name)
    if target is not None:
        module, _, attribute = target.partition(":")
        return getattr(importlib.import_module(module), attribute)  # type: ignore[no-any-return]
    for entry in entry_points(group=ENTRY_POINT_GROUP, name=name):
        return entry.load()  # type: ignore[no-any-return]
    raise InvalidArgument(
        f"unable to find repository agent '{name}', built in are {', '.join(sorted(BUILTIN))}"
    )


class ChecksumAgent(RepositoryAgent):
    """Verifies checksums. Parameters: `MD5:<file, relative to the model's folder>` to the hexadecimal hash."""

    def load(self, directory: Path) -> Path:
        for key, expected in sorted(self.parameters.items()):
            algorithm, colon, filename = key.partition(":")
            if not colon:
                raise InvalidArgument(f"failed to parse key: {key}, expected MD5:<file>")
            if algorithm.lower() != "md5":
                raise Unsupported(f"Unsupported checksum algorithm: {algorithm}")
            found = _md5(directory, filename)
            if found != expected.strip().lower():
                raise InvalidArgument(
                    f"Mismatched MD5 hash for file {filename}, expect: {expected}, got: {found}"
                )
        return directory


def _md5(directory: Path, filename: str) -> str:
    if not is_inside(filename):
        raise InvalidArgument(f"file '{filename}' must stay inside the model's folder")
    digest = hashlib.md5(usedforsecurity=False)
    try:
        with open(directory / filename, "rb") as file:
            while piece := file.read(1 << 20):
                digest.update(piece)
    except OSError as error:
        raise InvalidArgument(f"failed to open file for read {filename}: {error.strerror}") from None
    return digest.hexdigest()

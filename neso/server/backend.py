"""The contract of a backend: what executes the requests of a model."""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any

from neso.server.errors import InvalidArgument

if TYPE_CHECKING:
    from neso.generation import LanguageModel
    from neso.server.core import Core
    from neso.server.inference_response import ResponseStream
    from neso.server.statistics import ModelStatistics

BUILTIN = {
    "ensemble": "neso.backends.ensemble:EnsembleBackend",
    "llm": "neso.backends.llm:LlmBackend",
    "neso": "neso.backends.llm:LlmBackend",
    "python": "neso.backends.python.backend:PythonBackend",
}
ENTRY_POINT_GROUP = "neso.backends"


@dataclass(frozen=True, slots=True)
class ModelContext:
    """What a backend is told of the model version that it is to execute.

    `config` is the completed `ModelConfig` message; `auto_complete` may have changed it. `directory` is the
    model's folder in the repository, `version_directory` the version's folder in it.
    """

    core: Core
    name: str
    version: str
    config: Any
    directory: Path
    version_directory: Path
    statistics: ModelStatistics
    backend_config: dict[str, str]


class Backend(ABC):
    """Executes the requests of one model version. Made by the core, used on its event loop only.

    `counts_executions`: the backend executes several requests at once and calls `statistics.record_execution`
    itself; otherwise each request that succeeds counts as one execution.
    `batches`: it can execute several requests together, by `execute`; then the dynamic batcher may stand before it.
    """

    counts_executions = False
    batches = False

    def __init__(self, context: ModelContext) -> None:
        self.context = context

    @classmethod  # noqa: B027  most backends have nothing to add
    def auto_complete(
        cls, config: Any, directory: Path, version_directory: Path, backend_config: Mapping[str, str]
    ) -> None:
        """Fill in what the user left out of the `ModelConfig`. May block. Raises `ServerError`."""

    @abstractmethod
    async def load(self) -> None:
        """Get ready to execute. Raises `ServerError`: the model becomes UNAVAILABLE with that reason."""

    @abstractmethod
    def submit(self, request: ResponseStream) -> None:
        """Start to execute `request.request`, and answer on the stream, now or later. Must not block."""

    @property
    def num_instances(self) -> int:
        """How many executions run at the same time."""
        return sum(group.count for group in self.context.config.instance_group)

    def execute(
        self, batch: list[ResponseStream], done: Callable[[], None], instance: int | None = None
    ) -> None:
        """Start to execute requests together on an instance that is free, and call `done` when it is free again.

        `instance`: on that one (from 0), for models with sequence batching; None for others.
        `done` must be called on the core's loop. Must not block. For a backend that `batches`.
        """
        raise NotImplementedError

    @abstractmethod
    async def unload(self) -> None:
        """Let requests in flight end (the core submits no more), then give everything back."""

    def ready(self) -> bool:
        """Whether requests can be executed now."""
        return True

    async def check_ready(self) -> bool:
        """The same for those who ask for this model: a backend may take its time to ask the model itself."""
        return self.ready()

    @property
    def language_model(self) -> LanguageModel | None:
        """The model's text face, if it has one; front ends for language models need it."""
        return None


def find_backend(name: str) -> type[Backend]:
    """The backend class of that name, built in or from an entry point. Raises `InvalidArgument`."""
    target = BUILTIN.get(name)
    if target is not None:
        module, _, attribute = target.partition(":")
        return getattr(importlib.import_module(module), attribute)  # type: ignore[no-any-return]
    for entry in entry_points(group=ENTRY_POINT_GROUP, name=name):
        return entry.load()  # type: ignore[no-any-return]
    raise InvalidArgument(f"unable to find backend '{name}', built in are {', '.join(sorted(BUILTIN))}")

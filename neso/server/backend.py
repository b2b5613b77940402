"""The contract of a backend: what executes the requests of a model."""

from __future__ import annotations

import importlib
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any

from neso.server.config.scheduling import instances_of
from neso.server.errors import InvalidArgument

if TYPE_CHECKING:
    from neso.generation import LanguageModel, PoolingModel
    from neso.server.core import Core
    from neso.server.inference_response import ResponseStream
    from neso.server.rate_limiter.limiter import LimitedInstances
    from neso.server.statistics import ModelStatistics

BUILTIN = {
    "embedding": "neso.backends.embedding:EmbeddingBackend",
    "ensemble": "neso.backends.ensemble.backend:EnsembleBackend",
    "llm": "neso.backends.llm:LlmBackend",
    "neso": "neso.backends.llm:LlmBackend",
    "onnxruntime": "neso.backends.onnxruntime.backend:OnnxRuntimeBackend",
    "python": "neso.backends.python.backend:PythonBackend",
    "pytorch": "neso.backends.pytorch.backend:PyTorchBackend",
    "tensorrtllm": "neso.backends.tensorrtllm.backend:TensorRtLlmBackend",
    "vllm": "neso.backends.vllm.backend:VllmBackend",
}
EXTRAS = {"onnxruntime": "onnx", "pytorch": "torch", "vllm": "vllm"}
"""The extras of the `neso` package that backends need."""
ENTRY_POINT_GROUP = "neso.backends"
_IMPORTING = threading.Lock()
"""Models load in threads, and backends import each other's modules: at once, Python may give one up as a deadlock."""


@dataclass(frozen=True, slots=True)
class ModelContext:
    """What a backend is told of the model version that it is to execute.

    `config` is the completed `ModelConfig` message; `auto_complete` may have changed it. `directory` is the
    model's folder in the repository, `version_directory` the version's folder in it. `namespace` is the repository
    whose models are meant first by the names of others, empty where names are unique. `limited`: the instances as the
    rate limiter sees them, None when they wait for nothing.
    """

    core: Core
    name: str
    version: str
    config: Any
    directory: Path
    version_directory: Path
    statistics: ModelStatistics
    backend_config: dict[str, str]
    namespace: str = ""
    limited: LimitedInstances | None = None

    @property
    def assigns_instances(self) -> bool:
        """Whether the scheduler always says which instance is to execute: they are not alike to it."""
        return self.limited is not None or self.config.HasField("sequence_batching")


class Backend(ABC):
    """Executes the requests of one model version. Made by the core, used on its event loop only.

    `counts_executions`: the backend executes several requests at once and calls `statistics.record_execution`
    itself; otherwise each request that succeeds counts as one execution.
    `batches`: it can execute several requests together, by `execute`; then the dynamic batcher may stand before it.
    `concatenates`: it makes one tensor of an input of all requests that it executes together, as `Batch` does; requests
    whose sequences have states of other shapes come apart then.
    `on_reschedule`: what has a request of an iterative sequence executed again, in a later batch; to be called on the
    core's loop, before or after `done`. None for other models.
    `heeds`: fields of the configuration that it heeds itself, of those that say nothing to the core (`ignored_fields`),
    and "dynamic_batching" where it batches by itself.
    """

    counts_executions = False
    batches = False
    concatenates = False
    heeds: frozenset[str] = frozenset()

    def __init__(self, context: ModelContext) -> None:
        self.context = context
        self.on_reschedule: Callable[[ResponseStream], None] | None = None

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
        """How many executions run at the same time: as many as there are instances that are not passive."""
        return sum(not spec.passive for spec in instances_of(self.context.config))

    async def update_instances(self, config: Any) -> bool:
        """Have as many instances as another configuration says, which differs in nothing else; requests go on.

        False where that takes a load. `num_instances` is the new number afterwards. Raises `ServerError`: then nothing
        has changed.
        """
        return False

    def execute(
        self, batch: list[ResponseStream], done: Callable[[], None], instance: int | None = None
    ) -> None:
        """Start to execute requests together on an instance that is free, and call `done` when it is free again.

        `instance`: on that one, a number in `instances_of`; None for models whose context does not assign instances.
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

    @property
    def pooling_model(self) -> PoolingModel | None:
        """The face of a model that gives vectors, if it is one."""
        return None


def find_backend(name: str) -> type[Backend]:
    """The backend class of that name, built in or from an entry point. Raises `InvalidArgument`."""
    target = BUILTIN.get(name)
    try:
        with _IMPORTING:
            found = _imported(target) if target is not None else _entry_point(name).load()
    except ImportError as error:
        hint = f", it needs `pip install 'neso[{EXTRAS[name]}]'`" if name in EXTRAS else ""
        raise InvalidArgument(f"unable to load backend '{name}'{hint}: {error}") from None
    if not (isinstance(found, type) and issubclass(found, Backend)):
        raise InvalidArgument(
            f"unable to load backend '{name}': {found!r} is no subclass of {Backend.__name__}"
        )
    return found


def _imported(target: str) -> Any:
    module, _, attribute = target.partition(":")
    return getattr(importlib.import_module(module), attribute)


def _entry_point(name: str) -> EntryPoint:
    for entry in entry_points(group=ENTRY_POINT_GROUP, name=name):
        return entry
    raise InvalidArgument(
        f"unable to find backend '{name}', built in are {', '.join(sorted(BUILTIN))}; installed are "
        f"{', '.join(sorted(entry_points(group=ENTRY_POINT_GROUP).names)) or 'no others'}"
    )

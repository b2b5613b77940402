"""Interface of backends, which execute the requests of a model."""

from __future__ import annotations

import asyncio
import importlib
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any

from neso.generation import GenerationRequest, PoolingRequest
from neso.server.config.scheduling import instances_of
from neso.server.errors import Cancelled, InvalidArgument
from neso.server.inference_response import InferenceResponse, ResponseStream

if TYPE_CHECKING:
    from neso.generation import GenerationOutput, LanguageModel, PoolingModel
    from neso.server.core import Core
    from neso.server.inference_request import InferenceRequest
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
"""Extras of the `neso` package required by backends."""
ENTRY_POINT_GROUP = "neso.backends"
TextFields = Callable[["GenerationOutput"], dict[str, Any]]
"""Converts an output to members of a JSON response of the generate extension."""
_IMPORTING = threading.Lock()
"""Models load in threads; concurrent imports of backends that import each other can fail as a deadlock."""


@dataclass(frozen=True, slots=True)
class ModelContext:
    """The model version that a backend executes.

    - config: the `ModelConfig` message after `auto_complete`
    - directory, version_directory: folders of the model and of the version in the repository
    - namespace: repository in which names of other models are looked up first; "" if names are unique
    - limited: the instances under the rate limiter; None if they need no resources
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
        """Whether the scheduler chooses the instance of each execution."""
        return self.limited is not None or self.config.HasField("sequence_batching")


class RequestTasks:
    """Tasks of a backend, one per request: cancelled with the request, and with the model."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, stream: ResponseStream, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run `work`, which sends the responses to `stream`, errors included.

        A cancelled task is answered here: it may be cancelled before `work` has started.
        """
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)

        def on_done(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            if task.cancelled():
                stream.fail(Cancelled("the request was cancelled"))

        def cancel() -> None:
            task.cancel()

        task.add_done_callback(on_done)
        stream.request.on_cancel(cancel)
        return task

    async def end(self) -> None:
        """Cancel the tasks and wait for them."""
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class Backend(ABC):
    """Executes the requests of one model version. Created by the core, used on its event loop only.

    Class attributes:

    - counts_executions: the backend calls `statistics.record_execution` itself, because it executes several requests
      at once; otherwise each successful request counts as one execution
    - batches: `execute` is implemented, so that a batcher can be used
    - concatenates: `execute` concatenates the inputs of a batch into one tensor, as `Batch` does, so that implicit
      states of different shapes cannot be in one batch
    - implemented_fields: configuration fields that the backend implements itself among those that the core ignores
      (`ignored_fields`), and "dynamic_batching" if it batches internally

    `on_reschedule(stream)`: to be called on the core's loop, before or after `done`, to execute a request of an
    iterative sequence again in a later batch. None for other models.
    """

    counts_executions = False
    batches = False
    concatenates = False
    implemented_fields: frozenset[str] = frozenset()

    def __init__(self, context: ModelContext) -> None:
        self.context = context
        self.on_reschedule: Callable[[ResponseStream], None] | None = None
        self.request_tasks = RequestTasks()

    @classmethod  # noqa: B027  optional
    def auto_complete(
        cls, config: Any, directory: Path, version_directory: Path, backend_config: Mapping[str, str]
    ) -> None:
        """Complete the user's `ModelConfig` message in place. May block. Raises `ServerError`."""

    @abstractmethod
    async def load(self) -> None:
        """Load the model. Raises `ServerError`: the model becomes UNAVAILABLE with that reason."""

    @abstractmethod
    def submit(self, request: ResponseStream) -> None:
        """Start to execute a request with tensors; responses go to the stream. Must not block."""

    def submit_generation(self, stream: ResponseStream) -> None:
        """Start to execute a request whose payload is a `GenerationRequest`; by default with `language_model`."""
        self.request_tasks.start(stream, self._run_language_model(stream))

    def submit_pooling(self, stream: ResponseStream) -> None:
        """Start to execute a request whose payload is a `PoolingRequest`; by default with `pooling_model`."""
        self.request_tasks.start(stream, self._run_pooling_model(stream))

    @property
    def text_inputs(self) -> Mapping[str, type]:
        """Inputs that `read_text_request` takes as Python values, with their types; empty if it is not supported."""
        return {}

    def read_text_request(self, request: InferenceRequest, values: Mapping[str, Any]) -> TextFields | None:
        """Set the payload of a generate request from the values of `text_inputs` and the request's parameters.

        Returns the function that converts a result to members of the JSON response; None if the request needs
        tensors or is not valid, which `submit` reports.
        """
        return None

    @property
    def num_instances(self) -> int:
        """Number of concurrent executions: the instances that are not passive."""
        return sum(not spec.passive for spec in instances_of(self.context.config))

    async def update_instances(self, config: Any) -> bool:
        """Change the number of instances to that of `config`, which differs in nothing else, without a reload.

        False if that is not possible; True after `num_instances` has changed. Raises `ServerError` without a change.
        """
        return False

    def execute(
        self, batch: list[ResponseStream], done: Callable[[], None], instance: int | None = None
    ) -> None:
        """Start to execute a batch on a free instance; `done` is called on the core's loop when it is free again.

        `instance`: index in `instances_of`; None if the context does not assign instances. Must not block. Required
        if `batches`.
        """
        raise NotImplementedError

    @abstractmethod
    async def unload(self) -> None:
        """Let requests in flight finish (no more are submitted), then release all resources."""

    def ready(self) -> bool:
        """Whether requests can be executed now."""
        return True

    async def check_ready(self) -> bool:
        """As `ready`, for a readiness request about this model: may also ask the model itself."""
        return self.ready()

    @property
    def language_model(self) -> LanguageModel | None:
        """Text-generation interface of the model; None if it does not generate text."""
        return None

    @property
    def pooling_model(self) -> PoolingModel | None:
        """Pooling interface of the model (embeddings, scores); None if it has none."""
        return None

    async def _run_language_model(self, stream: ResponseStream) -> None:
        name, version, request = self.context.name, self.context.version, stream.request.payload
        assert self.language_model is not None and isinstance(request, GenerationRequest)
        try:
            async with aclosing(self.language_model.generate(request)) as outputs:
                async for output in outputs:
                    stream.send(InferenceResponse(name, version, result=output), final=output.finished)
            stream.finish()
        except Exception as error:
            stream.fail_with(error)

    async def _run_pooling_model(self, stream: ResponseStream) -> None:
        request = stream.request.payload
        assert self.pooling_model is not None and isinstance(request, PoolingRequest)
        try:
            result = await self.pooling_model.pool(request)
        except Exception as error:
            stream.fail_with(error)
        else:
            stream.send(InferenceResponse(self.context.name, self.context.version, result=result), final=True)


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

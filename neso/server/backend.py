"""Interface of backends, which execute model requests."""

from __future__ import annotations

import asyncio
import importlib
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any

from neso.generation import GenerationRequest, PoolingRequest
from neso.server.config.scheduling import instances_of
from neso.server.errors import Cancelled, InternalError, InvalidArgument
from neso.server.import_turn import IMPORT_SECONDS, import_turn
from neso.server.inference_response import InferenceResponse, ResponseStream
from neso.server.log import request_fields
from neso.server.metrics.registry import ModelMetrics
from neso.server.repository.names import is_inside

if TYPE_CHECKING:
    from neso.engine.client.engine_group import EngineGroup
    from neso.generation import GenerationOutput, LanguageModel, PoolingModel
    from neso.server.core import Core
    from neso.server.inference_request import InferenceRequest
    from neso.server.rate_limiter.limiter import LimitedInstances
    from neso.server.statistics import ModelStatistics

logger = logging.getLogger(__name__)

BUILTIN = {
    "embedding": "neso.backends.embedding:EmbeddingBackend",
    "ensemble": "neso.backends.ensemble.backend:EnsembleBackend",
    "llm": "neso.backends.llm:LlmBackend",
    "neso": "neso.backends.llm:LlmBackend",
    "onnxruntime": "neso.backends.onnxruntime.backend:OnnxRuntimeBackend",
    "openvino": "neso.backends.openvino.backend:OpenVinoBackend",
    "python": "neso.backends.python.backend:PythonBackend",
    "pytorch": "neso.backends.pytorch.backend:PyTorchBackend",
    "tensorflow": "neso.backends.tensorflow.backend:TensorFlowBackend",
    "tensorrtllm": "neso.backends.tensorrtllm.backend:TensorRtLlmBackend",
    "vllm": "neso.backends.vllm.backend:VllmBackend",
}
EXTRAS = {
    "onnxruntime": "onnx",
    "openvino": "openvino",
    "pytorch": "torch",
    "tensorflow": "tensorflow",
    "vllm": "vllm",
}
"""Extras of the `neso` package required by backends."""
ENTRY_POINT_GROUP = "neso.backends"
TextFields = Callable[["GenerationOutput"], dict[str, Any]]
"""Converts an output to fields of a JSON response of the generate extension."""


@dataclass(frozen=True, slots=True)
class ModelContext:
    """The model version that a backend executes.

    - config: the `ModelConfig` message after `auto_complete`
    - directory, version_directory: folders of the model and of the version in the repository
    - namespace: repository searched first for the names of other models; "" if names are unique
    - limited: rate-limited instances; None if the instances need no resources
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
    def metrics(self) -> ModelMetrics:
        """Families of metrics, with the labels of this model."""
        return ModelMetrics(self.core.metrics, self.name, self.version, self.namespace)

    @property
    def assigns_instances(self) -> bool:
        """Whether the scheduler chooses the instance of each execution."""
        return self.limited is not None or self.config.HasField("sequence_batching")


class RequestTasks:
    """Tasks of a backend, one per request. A task is cancelled with its request or when the model is unloaded."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, stream: ResponseStream, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run `work`, which sends all responses, including errors, to `stream`.

        The response to a cancelled task is sent here, because the task can be cancelled before `work` starts.
        """
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)

        def on_done(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            if task.cancelled():
                stream.fail(Cancelled("the request was cancelled"))
            elif (error := task.exception()) is not None:
                logger.error("a request failed", exc_info=error, extra=request_fields(stream))
                stream.fail(InternalError(f"the request failed: {error}"))

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
    """Executes the requests of one model version. Created by the core and used only on its event loop.

    Class attributes:

    - counts_executions: the backend calls `statistics.record_execution` itself, because one execution covers several
      requests; otherwise each successful request counts as one execution
    - batches: `execute` is implemented, so a batcher can be used
    - concatenates: `execute` concatenates the inputs of a batch into one tensor, as `Batch` does; implicit states of
      different shapes then cannot be in one batch
    - shares_tensors: front-end processes that `share` the model execute requests with tensors too
    - on_workers: the model runs on workers of a stage: its requests can have inputs that other workers keep, and
      `kept_outputs`
    - implemented_fields: fields ignored by the core (`ignored_fields`) that the backend implements itself, and
      "dynamic_batching" if the backend batches internally

    `on_reschedule(stream)` schedules another execution of an iterative-sequence request in a later batch. The backend
    calls it on the core's loop, before or after `done`. None for other models.
    """

    counts_executions = False
    batches = False
    concatenates = False
    shares_tensors = True
    on_workers = False
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
        """Start executing a tensor request; responses are sent to the stream. Must not block.

        A backend that sends many responses waits for slow clients with `stream.backlog`, see `ResponseStream`.
        """

    def submit_generation(self, stream: ResponseStream) -> None:
        """Start executing a request with a `GenerationRequest` payload; by default with `language_model`."""
        self.request_tasks.start(stream, self._run_language_model(stream))

    def submit_pooling(self, stream: ResponseStream) -> None:
        """Start executing a request with a `PoolingRequest` payload; by default with `pooling_model`."""
        self.request_tasks.start(stream, self._run_pooling_model(stream))

    @property
    def text_inputs(self) -> Mapping[str, type]:
        """Types of the inputs that `read_text_request` accepts as Python values, by name; empty if not supported."""
        return {}

    def read_text_request(self, request: InferenceRequest, values: Mapping[str, Any]) -> TextFields | None:
        """Set the payload of a generate request from the `text_inputs` values and the request parameters.

        Returns a function that converts a result to fields of the JSON response. Returns None if the request needs
        tensors or is invalid; `submit` then reports the error.
        """
        return None

    @property
    def output_labels(self) -> Mapping[str, Sequence[str]]:
        """Classification labels of outputs without a label file, by output. Read after `load`."""
        return {}

    @property
    def num_instances(self) -> int:
        """Number of concurrent executions: the number of active (not passive) instances."""
        return sum(not spec.passive for spec in instances_of(self.context.config))

    @property
    def capacity(self) -> int:
        """Batch entries that are executed at a time, read after `load`: a worker of a stage takes no more.

        By default, the batch entries of the instances: `max_batch_size` of each with `dynamic_batching`, else one.
        """
        config = self.context.config
        batch = int(config.max_batch_size) if config.HasField("dynamic_batching") else 1
        return max(1, self.num_instances) * max(1, batch)

    @property
    def max_queue_size(self) -> int | None:
        """Limit of waiting requests that the backend's own options have, read after `load`; None: they have none."""
        return None

    @property
    def engine_group(self) -> EngineGroup | None:
        """The engines of a model on Neso's engine, read after `load`; None for other models."""
        return None

    @classmethod
    def stops(cls, request: InferenceRequest) -> bool:
        """Return whether a request is to end those with its id."""
        return False

    async def update_instances(self, config: Any) -> bool:
        """Change the number of instances to the number in `config`, without a reload. `config` has no other changes.

        Returns True once `num_instances` has changed; False if a reload is required. If it raises `ServerError`,
        nothing has changed.
        """
        return False

    def execute(
        self, batch: list[ResponseStream], done: Callable[[], None], instance: int | None = None
    ) -> None:
        """Start executing a batch on a free instance; call `done` on the core's loop when the instance is free again.

        `instance`: index in `instances_of`; None if the context does not assign instances. Must not block. Required
        if `batches`.
        """
        raise NotImplementedError

    @abstractmethod
    async def unload(self) -> None:
        """Finish the requests in flight (no new requests are submitted), then release all resources.

        Cancelled when it takes too long; it must then kill its processes.
        """

    def ready(self) -> bool:
        """Return whether requests can be executed now."""
        return True

    def live(self) -> bool:
        """Return False if the model has failed for good and only a restart of the server or a reload can help."""
        return True

    async def check_ready(self) -> bool:
        """Like `ready`, for readiness requests about this model; may also run the model's own readiness check."""
        return self.ready()

    @property
    def language_model(self) -> LanguageModel | None:
        """Text-generation interface of the model; None if it does not generate text."""
        return None

    @property
    def pooling_model(self) -> PoolingModel | None:
        """Pooling interface of the model (embeddings, scores); None if it has none."""
        return None

    def share(self) -> Any:
        """Return what front-end processes need to use the model without the server process; picklable.

        None: they forward the requests. A front-end process passes it to `connect` of its own backend.
        """
        return None

    async def connect(self, share: Any, attach: Callable[..., Any]) -> None:
        """In a front-end process, instead of `load`: use the model of the server process.

        `attach(*arguments)` calls the method `attach` of the backend there. Raises `ServerError`.
        """
        raise NotImplementedError

    async def attach(self, client: int, *arguments: Any) -> Any:
        """Connect the front-end process with the number `client`. Raises `ServerError`."""
        raise NotImplementedError

    def detach(self, client: int) -> None:  # noqa: B027  optional
        """Release everything of a front-end process that has ended; called for each process, attached or not."""

    async def _run_language_model(self, stream: ResponseStream) -> None:
        name, version, request = self.context.name, self.context.version, stream.request.payload
        assert self.language_model is not None and isinstance(request, GenerationRequest)
        try:
            async with aclosing(self.language_model.generate(request)) as outputs:
                async for output in outputs:
                    if stream.backlog is not None:
                        await stream.backlog.wait()
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


PYTHON_BASED_FILE = "model.py"


def python_based_file(name: str, directory: Path | None) -> Path | None:
    """Return the file of a Python-based backend in the backend directory; None if there is none with this name."""
    if directory is None or name in BUILTIN or "/" in name or not is_inside(name):
        return None
    file = directory.absolute() / name / PYTHON_BASED_FILE
    return file if file.is_file() else None


def find_backend(name: str, directory: Path | None = None) -> type[Backend]:
    """Return the backend class with this name. Raises `InvalidArgument`.

    Backends are built in, Python-based in `directory`, or registered as an entry point.
    """
    target = BUILTIN.get(name)
    file = python_based_file(name, directory)
    try:
        with import_turn.held(IMPORT_SECONDS):
            if file is not None:
                python = _imported(BUILTIN["python"])
                found: Any = type(python.__name__, (python,), {"model_file": file})
            else:
                found = _imported(target) if target is not None else _entry_point(name).load()
    except ImportError as error:
        hint = f", it needs `pip install 'neso-server[{EXTRAS[name]}]'`" if name in EXTRAS else ""
        raise InvalidArgument(f"unable to load backend '{name}'{hint}: {error}") from None
    if not (isinstance(found, type) and issubclass(found, Backend)):
        raise InvalidArgument(
            f"unable to load backend '{name}': {found!r} is not a subclass of {Backend.__name__}"
        )
    return found


def stage_backend(backend: type[Backend]) -> type[Backend]:
    """Return the backend that executes models of `backend` on workers."""
    found: type[Backend] = _imported("neso.backends.stage:StageBackend").of(backend)
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

"""One request through an ensemble: each step starts when its tensors are there.

Tensors live in scopes. The request's scope holds what is produced once; every response of a decoupled step opens a
scope below, whose steps see its tensors and those above. So what follows a decoupled step runs once for each of its
responses, and a tensor beside it is there for all of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

from neso.backends.ensemble.graph import EnsembleGraph, Step
from neso.server.errors import Cancelled, InternalError, ServerError
from neso.server.inference_request import InferenceRequest
from neso.server.inference_response import InferenceResponse, ResponseStream
from neso.server.tensor import Tensor

if TYPE_CHECKING:
    from neso.server.model import Model

FindModel = Callable[[str, str], "Model"]


class Scope:
    """Tensors by the ensemble's names, and those of the scopes above."""

    def __init__(self, parent: Scope | None = None) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.children: list[Scope] = []
        self.started: set[int] = set()
        self.answered = False
        self._parent = parent
        if parent is not None:
            parent.children.append(self)

    def find(self, name: str) -> Tensor | None:
        scope: Scope | None = self
        while scope is not None:
            if name in scope.tensors:
                return scope.tensors[name]
            scope = scope._parent
        return None

    def has_started(self, step: int) -> bool:
        """Whether a step ran here or above: what it gave is seen here too."""
        return step in self.started or (self._parent is not None and self._parent.has_started(step))


class EnsembleRun:
    """Made and run on the core's loop."""

    def __init__(
        self, graph: EnsembleGraph, stream: ResponseStream, find_model: FindModel, decoupled: bool
    ) -> None:
        self._graph, self._stream, self._find_model, self._decoupled = graph, stream, find_model, decoupled
        self._wanted = stream.request.requested_outputs or graph.outputs
        self._needed = graph.steps_for(self._wanted)
        self._tasks: set[asyncio.Task[None]] = set()
        self._streams: set[ResponseStream] = set()
        self._slots: dict[int, asyncio.Semaphore] = {}
        self._answers = 0

    def start(self) -> None:
        """Start the steps that need only the request."""
        self._stream.request.on_cancel(self._cancel)
        scope = Scope()
        scope.tensors.update(self._stream.request.inputs)
        self._advance(scope, list(self._graph.steps))
        self._end_if_done()

    def _advance(self, scope: Scope, steps: list[Step]) -> None:
        """Start those of the steps that have all their tensors, in a scope and those below; answer if it can be."""
        for step in steps:
            if step.index in self._needed and not scope.has_started(step.index):
                inputs = {name: scope.find(tensor) for name, tensor in step.inputs.items()}
                given = {name: tensor for name, tensor in inputs.items() if tensor is not None}
                missing = {step.inputs[name] for name in inputs.keys() - given.keys()}
                # An optional input that the client left out will never come.
                if given and all(name in self._graph.inputs for name in missing):
                    scope.started.add(step.index)
                    self._run(self._execute(step, scope, given))
        self._answer(scope)
        for child in scope.children:
            self._advance(child, steps)

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._task_done)

    def _task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(
                error if isinstance(error, ServerError) else InternalError(f"{type(error).__name__}: {error}")
            )
        self._end_if_done()

    async def _execute(self, step: Step, scope: Scope, inputs: dict[str, Tensor]) -> None:
        if not self._graph.max_inflight:
            await self._consume(step, scope, inputs)
            return
        async with self._slots.setdefault(step.index, asyncio.Semaphore(self._graph.max_inflight)):
            await self._consume(step, scope, inputs)

    async def _consume(self, step: Step, scope: Scope, inputs: dict[str, Tensor]) -> None:
        """Run one step; its tensors go to the scope, or each response of a decoupled step to one of its own."""
        model = self._find_model(step.model, step.version)
        stream = model.submit(self._request(step, inputs))
        self._streams.add(stream)
        try:
            async for response in stream:
                if response.error is not None:
                    raise response.error
                if response.outputs:
                    target = Scope(scope) if model.decoupled else scope
                    self._take(step, target, response)
                    await self._back_pressure(step)
        finally:
            self._streams.discard(stream)
            if not stream.closed:
                stream.cancel()

    def _request(self, step: Step, inputs: dict[str, Tensor]) -> InferenceRequest:
        source = self._stream.request
        return InferenceRequest(
            model_name=step.model,
            model_version=step.version,
            id=source.id,
            inputs={name: Tensor(name, tensor.datatype, tensor.array) for name, tensor in inputs.items()},
            requested_outputs=tuple(step.outputs),
            parameters=dict(source.parameters),
            priority=source.priority,
            timeout_us=source.timeout_us,
            sequence_id=source.sequence_id,
            sequence_start=source.sequence_start,
            sequence_end=source.sequence_end,
            trace=self._stream.trace,
        )

    def _take(self, step: Step, scope: Scope, response: InferenceResponse) -> None:
        fresh = []
        for output in response.outputs:
            name = step.outputs.get(output.name)
            if name is not None:
                scope.tensors[name] = Tensor(name, output.datatype, output.array)
                fresh.append(name)
        readers = {s.index: s for name in fresh for s in self._graph.consumers.get(name, ())}
        self._advance(scope, [readers[index] for index in sorted(readers)])

    async def _back_pressure(self, step: Step) -> None:
        """Take no more responses of a step while too many of those before are on their way through the next."""
        if not self._graph.max_inflight:
            return
        for name in step.outputs.values():
            for reader in self._graph.consumers.get(name, ()):
                slots = self._slots.setdefault(reader.index, asyncio.Semaphore(self._graph.max_inflight))
                async with slots:
                    pass

    def _answer(self, scope: Scope) -> None:
        """Send the response of a scope that has something of its own to tell, once all that is wanted is there."""
        if scope.answered or self._stream.closed:
            return
        outputs = [scope.find(name) for name in self._wanted]
        if any(tensor is None for tensor in outputs):
            return
        if self._answers and not any(name in scope.tensors for name in self._wanted):
            return
        scope.answered = True
        self._answers += 1
        response = InferenceResponse("", "", outputs=[tensor for tensor in outputs if tensor is not None])
        self._stream.send(response, final=not self._decoupled)

    def _end_if_done(self) -> None:
        if self._tasks or self._stream.closed:
            return
        if self._decoupled:
            self._stream.finish()
        else:
            self._fail(
                InternalError(
                    "unexpected deadlock, at least one output is not set while no more ensemble steps can be made"
                )
            )

    def _fail(self, error: ServerError) -> None:
        """End the request and what still runs for it."""
        self._stream.fail(type(error)(f"in ensemble '{self._graph.name}', {error.message}", error.code))
        self._cancel_steps()

    def _cancel(self) -> None:
        self._cancel_steps()
        self._stream.fail(Cancelled("the request was cancelled"))

    def _cancel_steps(self) -> None:
        for stream in tuple(self._streams):
            stream.cancel()
        for task in tuple(self._tasks):
            task.cancel()

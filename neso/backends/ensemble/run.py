"""Execution of one ensemble request. Each step starts when its input tensors are available.

Tensors are stored in nested scopes. The root scope contains the request's tensors and the outputs of steps that run
once. Each response of a decoupled step opens a child scope, which also has access to the tensors of its ancestors.
Therefore the steps after a decoupled step run once per response and share the tensors of the parent scope. These steps
can run concurrently and end in any order; the responses of the ensemble are sent in the order of the scopes.

A tensor is absent if it is an optional input omitted by the client, or an output not returned by a step. Steps run
without it if it is optional for them, and the ensemble's response omits it.
"""

from __future__ import annotations

import logging
import operator
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy.typing as npt

from neso.backends.ensemble.graph import EnsembleGraph, Step
from neso.server.errors import Cancelled, ErrorCode, InternalError, LostTensor, ServerError
from neso.server.inference_request import InferenceRequest, ParameterValue
from neso.server.inference_response import InferenceResponse, ResponseStream
from neso.server.signature import Shape
from neso.server.statistics import FailureReason
from neso.server.tensor import Tensor

if TYPE_CHECKING:
    from neso.server.model import Model

logger = logging.getLogger(__name__)

FindModel = Callable[[str, str], "Model"]


class Scope:
    """Tensors by name, with fallback to the parent scope.

    - absent: names of absent tensors
    - children: ordered set of the scopes that can still have responses
    - num_executions: steps that are executed or queued in this scope; num_opening: the decoupled ones of these, whose
      outputs go to new scopes
    - decided: all requested outputs are known here or absent; response: the response with them, not sent yet
    """

    __slots__ = (
        *("_parent", "absent", "children", "decided", "num_executions", "num_opening", "response"),
        *("started", "tensors"),
    )

    def __init__(self, parent: Scope | None = None) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.absent: set[str] = set()
        self.children: dict[Scope, None] = {}
        self.started: set[int] = set()
        self.num_executions = self.num_opening = 0
        self.decided = False
        self.response: InferenceResponse | None = None
        self._parent = parent
        if parent is not None:
            parent.children[self] = None

    def find(self, name: str) -> Tensor | None:
        scope: Scope | None = self
        while scope is not None:
            if name in scope.tensors:
                return scope.tensors[name]
            scope = scope._parent
        return None

    def lacks(self, name: str) -> bool:
        """Return whether a tensor is absent in this scope or an ancestor."""
        return name in self.absent or (self._parent is not None and self._parent.lacks(name))

    def has_started(self, step: int) -> bool:
        """Return whether a step was started in this scope or an ancestor, so that its outputs are visible here."""
        return step in self.started or (self._parent is not None and self._parent.has_started(step))

    def take_responses(self, responses: list[InferenceResponse], awaits: bool = False) -> bool:
        """Append the responses that are next in order. Returns whether the scope can have no others.

        `awaits`: whether a step of an ancestor is executed whose outputs belong to this scope too.
        """
        if self.response is not None:
            responses.append(self.response)
            self.response = None
        if self.decided:
            return True
        awaits = awaits or self.num_executions > self.num_opening
        for child in tuple(self.children):
            if not child.take_responses(responses, awaits):
                return False
            del self.children[child]
        return not self.num_executions and not awaits


class EnsembleRun:
    """Executes one request. Driven by callbacks of the steps' responses, on the core's event loop.

    `attempts`: how often the request is executed if workers are lost that keep outputs for the next step.
    """

    def __init__(
        self,
        graph: EnsembleGraph,
        stream: ResponseStream,
        find_model: FindModel,
        decoupled: bool,
        attempts: int = 1,
    ) -> None:
        self._attempts, self._repeated = attempts, False
        self._graph, self._stream, self._find_model, self._decoupled = graph, stream, find_model, decoupled
        self._requested = stream.request.requested_outputs or graph.outputs
        self._needed = graph.steps_for(self._requested)
        self._streams: set[ResponseStream] = set()
        self._running: Counter[int] = Counter()  # executions in flight, by step
        # Queued executions by step, limited by max_inflight.
        self._waiting: dict[int, deque[tuple[Scope, dict[str, Tensor]]]] = {}
        self._num_responses = 0
        self._root = Scope()
        self._compute = (0, 0, 0)  # compute input, infer and output durations of the steps, in ns
        # Nesting depth of `_processing`: a step can respond while another step is being started.
        self._depth = 0

    def start(self) -> None:
        """Start the steps whose inputs are in the request."""
        self._stream.request.on_cancel(self._cancel)
        self._stream.timeline.compute_start = time.monotonic_ns()
        self._stream.timeline.compute = self._compute
        scope = self._root
        scope.tensors.update(self._stream.request.inputs)
        scope.absent.update(self._graph.inputs - scope.tensors.keys())
        with self._processing():
            self._advance(scope, list(self._graph.steps))

    @contextmanager
    def _processing(self) -> Iterator[None]:
        """Context of callbacks. Errors fail the request; the outermost context ends it if all steps have ended."""
        self._depth += 1
        try:
            yield
        except ServerError as error:
            self._fail(error)
        except Exception as error:
            logger.exception("ensemble '%s' failed", self._graph.name)
            self._fail(InternalError(f"{type(error).__name__}: {error}"))
        finally:
            self._depth -= 1
        if not self._depth:
            self._send_responses()
            self._end_if_done()

    def _advance(self, scope: Scope, steps: list[Step]) -> None:
        """Start the given steps whose tensors are available, in a scope and its children; send complete responses."""
        for step in steps:
            if step.index in self._needed and not scope.has_started(step.index):
                given: dict[str, Tensor] = {}
                for name, source in step.inputs.items():
                    tensor = scope.find(source)
                    if tensor is not None:
                        given[name] = tensor
                    elif not scope.lacks(source):
                        break  # not produced yet
                else:
                    scope.started.add(step.index)
                    if given:
                        scope.num_executions += 1
                        self._begin(step, scope, given)
                    else:
                        self._store_outputs(step, scope, {})
        self._respond(scope)
        for child in tuple(scope.children):
            if not child.decided:
                self._advance(child, steps)

    def _begin(self, step: Step, scope: Scope, inputs: dict[str, Tensor]) -> None:
        """Execute a step, or queue it while `max_inflight` executions of it are running."""
        limit = self._graph.max_inflight
        if limit and self._running[step.index] >= limit:
            self._waiting.setdefault(step.index, deque()).append((scope, inputs))
        elif not self._stream.closed:
            self._execute(step, scope, inputs)

    def _execute(self, step: Step, scope: Scope, inputs: dict[str, Tensor]) -> None:
        """Submit a step's request. Outputs go to the scope, or for a decoupled model to a child scope per response."""
        model = self._find_model(step.model, step.version)
        stream = model.submit(self._request(step, model, inputs))
        self._running[step.index] += 1
        self._streams.add(stream)
        scope.num_opening += model.decoupled

        def receive(response: InferenceResponse) -> None:
            with self._processing():
                if self._repeated:
                    return
                response.raise_error()
                if response.final:
                    self._add_durations(stream)
                if response.outputs and not self._stream.closed:
                    outputs = {tensor.name: tensor for tensor in response.outputs}
                    self._store_outputs(step, Scope(scope) if model.decoupled else scope, outputs)
                if response.final:
                    self._streams.discard(stream)
                    scope.num_executions -= 1
                    scope.num_opening -= model.decoupled
                    self._ended(step)

        stream.consume(receive)

    def _add_durations(self, stream: ResponseStream) -> None:
        """Add the compute durations of an ended step to those of the ensemble, as Triton counts them."""
        if stream.timeline.compute_start:
            _, *durations = stream.timeline.stages(time.monotonic_ns())
            compute_input, infer, output = map(operator.add, self._compute, durations)
            self._compute = self._stream.timeline.compute = (compute_input, infer, output)

    def _ended(self, step: Step) -> None:
        self._running[step.index] -= 1
        waiting = self._waiting.get(step.index)
        if waiting:
            self._begin(step, *waiting.popleft())

    def _request(self, step: Step, model: Model, inputs: dict[str, Tensor]) -> InferenceRequest:
        source, signature = self._stream.request, model.signature
        batches = signature.max_batch_size > 0
        return InferenceRequest(
            model_name=step.model,
            model_version=step.version,
            id=source.id,
            inputs={
                name: Tensor(
                    name, tensor.datatype, self._shaped(tensor, signature.inputs[name].dims, batches)
                )
                for name, tensor in inputs.items()
            },
            requested_outputs=tuple(step.outputs),
            kept_outputs=self._kept_outputs(step) if model.passes_references else {},
            parameters=dict(source.parameters),
            priority=source.priority,
            timeout_us=source.timeout_us,
            sequence_id=source.sequence_id,
            sequence_start=source.sequence_start,
            sequence_end=source.sequence_end,
            trace=self._stream.trace,
            client="",
            backlog=self._stream.backlog,
        )

    def _kept_outputs(self, step: Step) -> dict[str, bool]:
        """Return the outputs that other steps on workers read, and whether this process needs them too."""
        kept: dict[str, bool] = {}
        for output, name in step.outputs.items():
            readers = [
                reader for reader in self._graph.consumers.get(name, ()) if reader.index in self._needed
            ]
            passes = [self._find_model(reader.model, reader.version).passes_references for reader in readers]
            if any(passes):
                kept[output] = name in self._requested or not all(passes)
        return kept

    def _shaped(self, tensor: Tensor, dims: Shape, batches: bool) -> npt.NDArray[Any]:
        """Return the array of a tensor, with or without batch dimension as a model with these `dims` needs it.

        A dimension of 1 is added or removed if only one of the tensor's producer and its consumer batches.
        """
        array = tensor.array
        missing = len(dims) + batches - array.ndim
        if missing == 1 and batches and not self._is_batched(tensor.name):
            return array.reshape(1, *array.shape)
        if missing == -1 and not batches and array.shape[0] == 1 and self._is_batched(tensor.name):
            return array.reshape(array.shape[1:])
        return array

    def _is_batched(self, name: str) -> bool:
        """Return whether the producer of a tensor batches."""
        producer = self._graph.producer(name)
        if producer is None:
            return self._graph.batches
        model = self._find_model(producer.model, producer.version)
        return model.signature.max_batch_size > 0

    def _store_outputs(self, step: Step, scope: Scope, outputs: dict[str, Tensor]) -> None:
        """Store the outputs of a step, mark missing outputs as absent, and start the steps that read them."""
        readers: dict[int, Step] = {}
        for output, name in step.outputs.items():
            tensor = outputs.get(output)
            if tensor is None:
                scope.absent.add(name)
            else:
                scope.tensors[name] = Tensor(name, tensor.datatype, tensor.array)
            for reader in self._graph.consumers.get(name, ()):
                readers[reader.index] = reader
        self._advance(scope, [readers[index] for index in sorted(readers)])

    def _respond(self, scope: Scope) -> None:
        """Make the response of a scope if all requested outputs are known and at least one is new in this scope."""
        if scope.decided or self._stream.closed:
            return
        outputs = []
        for name in self._requested:
            tensor = scope.find(name)
            if tensor is not None:
                array = self._shaped(tensor, self._graph.output_dims[name], self._graph.batches)
                outputs.append(Tensor(name, tensor.datatype, array))
            elif not scope.lacks(name):
                return
        scope.decided = True
        if not outputs or (
            self._num_responses and not any(name in scope.tensors for name in self._requested)
        ):
            return
        self._num_responses += 1
        response = InferenceResponse("", "", outputs=outputs, parameters=self._parameters())
        if self._decoupled:
            scope.response = response
        else:
            self._stream.send(response, final=True)

    def _parameters(self) -> dict[str, ParameterValue]:
        """Return the response parameters, as in Triton's ensembles."""
        request = self._stream.request
        return {
            "sequence_id": request.sequence_id,
            "sequence_start": request.sequence_start,
            "sequence_end": request.sequence_end,
        }

    def _send_responses(self) -> None:
        """Send the responses of a decoupled ensemble that are next in order.

        The last one is final if all steps have ended.
        """
        unsent: list[InferenceResponse] = []
        self._root.take_responses(unsent)
        for response in unsent:
            self._stream.send(response, final=response is unsent[-1] and not self._streams)

    def _end_if_done(self) -> None:
        if self._streams or self._stream.closed or self._repeated:
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
        """Fail the request and cancel its steps. Counts as OTHER in the statistics, as in Triton, unless cancelled."""
        if isinstance(error, LostTensor) and self._repeat():
            return
        if error.code is not ErrorCode.CANCELLED and not self._stream.request.cancelled:
            self._stream.failure = self._stream.failure or FailureReason.OTHER
        self._stream.fail(type(error)(f"in ensemble '{self._graph.name}', {error.message}", error.code))
        self._cancel_steps()

    def _repeat(self) -> bool:
        """Execute the request again, unless it has sent a response or was the last attempt."""
        if (
            self._attempts <= 1
            or self._num_responses
            or self._stream.closed
            or self._stream.request.cancelled
        ):
            return False
        logger.warning("ensemble '%s': a request is executed again: a worker is lost", self._graph.name)
        self._repeated = True
        self._cancel_steps()
        EnsembleRun(self._graph, self._stream, self._find_model, self._decoupled, self._attempts - 1).start()
        return True

    def _cancel(self) -> None:
        self._cancel_steps()
        self._stream.fail(Cancelled("the request was cancelled"))

    def _cancel_steps(self) -> None:
        self._waiting.clear()
        for stream in tuple(self._streams):
            stream.cancel()

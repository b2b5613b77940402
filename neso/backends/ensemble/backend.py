"""`EnsembleBackend`: executes models with `ensemble_scheduling` as a dataflow graph of other models."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from neso.backends.ensemble.graph import EnsembleGraph
from neso.backends.ensemble.run import EnsembleRun
from neso.server.backend import Backend, ModelContext
from neso.server.errors import InvalidArgument, ServerError, Unavailable
from neso.server.inference_response import ResponseStream
from neso.server.signature import Shape, Signature, dims_agree
from neso.server.tensor import DataType

if TYPE_CHECKING:
    from neso.server.model import Model

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _TensorUse:
    """A tensor of an ensemble as one model declares it. `dims` excludes the batch dimension."""

    tensor: str
    model: str
    datatype: DataType
    dims: Shape
    batches: bool

    @property
    def full_dims(self) -> Shape:
        return (-1, *self.dims) if self.batches else self.dims


class EnsembleBackend(Backend):
    """Executes an ensemble. It is ready while the models of its steps are ready.

    It is decoupled if a step is: as in Triton, its own transaction policy has no effect.
    """

    def __init__(self, context: ModelContext) -> None:
        super().__init__(context)
        self._graph = EnsembleGraph(context.config)
        self._decoupled = False

    async def load(self) -> None:
        """Load the models of the steps that are not loaded, and check the tensor mappings. Raises `InvalidArgument`."""
        for name in dict.fromkeys(step.model for step in self._graph.steps):
            try:
                await self.context.core.require_model(name, self.context.namespace)
            except ServerError as error:
                raise InvalidArgument(
                    f"ensemble '{self.context.name}' depends on '{name}' which has no loaded version: {error.message}"
                ) from None
        for step in self._graph.steps:
            self._check_step(step.index)
        self._check_connections()
        self._check_decoupled_steps()
        self._decoupled = self._is_decoupled()
        self.context.config.model_transaction_policy.decoupled = self._decoupled
        if self._graph.max_inflight:
            logger.info(
                "Ensemble model '%s' configured with max_inflight_requests: %d",
                self.context.name,
                self._graph.max_inflight,
            )

    @property
    def output_labels(self) -> Mapping[str, Sequence[str]]:
        """Labels of the steps' outputs that the ensemble returns."""
        labels: dict[str, Sequence[str]] = {}
        for name in self._graph.outputs:
            step = self._graph.producer(name)
            if step is not None:
                output = next(output for output, tensor in step.outputs.items() if tensor == name)
                labels[name] = self._find_model(step.model, step.version).labels.get(output, ())
        return labels

    def submit(self, request: ResponseStream) -> None:
        if self._policy_has_changed():
            name = self.context.name
            request.fail(
                Unavailable(
                    f"ensemble '{name}' must be loaded again: a model of its steps has another transaction policy now"
                )
            )
            return
        attempts = self.context.core.options.stages.max_attempts
        EnsembleRun(self._graph, request, self._find_model, self._decoupled, attempts).start()

    def _policy_has_changed(self) -> bool:
        try:
            return self._is_decoupled() != self._decoupled
        except ServerError:  # a model is not loaded, which the run reports
            return False

    def _is_decoupled(self) -> bool:
        return any(self._find_model(step.model, step.version).decoupled for step in self._graph.steps)

    async def unload(self) -> None:
        """No resources to release: the server owns the models of the steps."""

    def ready(self) -> bool:
        return all(
            self.context.core.model_ready(step.model, step.version, self.context.namespace)
            for step in self._graph.steps
        )

    def _find_model(self, name: str, version: str) -> Model:
        return self.context.core.model(name, version, self.context.namespace)

    async def check_ready(self) -> bool:
        core, namespace = self.context.core, self.context.namespace
        checks = (core.check_model_ready(step.model, step.version, namespace) for step in self._graph.steps)
        return all(await asyncio.gather(*checks))

    def _check_step(self, index: int) -> None:
        """Raise `InvalidArgument` for unknown tensor names, missing required inputs and too small batches of a step."""
        step = self._graph.steps[index]
        model = self._find_model(step.model, step.version)
        where = f"in ensemble '{self.context.name}', step {index}: model '{step.model}'"
        most, allowed = model.signature.max_batch_size, int(self.context.config.max_batch_size)
        if most and most < allowed:
            raise InvalidArgument(
                f"ensemble '{self.context.name}' allows maximum batch size {allowed}, but it contains model "
                f"'{step.model}' which only allows maximum batch size to be {most}"
            )
        for name in step.inputs.keys() - model.signature.inputs.keys():
            raise InvalidArgument(f"{where} has no input '{name}'")
        for name in step.outputs.keys() - model.signature.outputs.keys():
            raise InvalidArgument(f"{where} has no output '{name}'")
        required = {name for name, spec in model.signature.inputs.items() if not spec.optional}
        for name in sorted(required - step.inputs.keys()):
            raise InvalidArgument(f"{where} needs the input '{name}', which is not in the input_map")

    def _check_connections(self) -> None:
        """Raise `InvalidArgument` if the ensemble and its steps disagree on datatype or shape of a tensor.

        Shapes agree with or without the batch dimension, and -1 agrees with any extent, as in Triton.
        """
        name = self.context.name
        first: dict[str, _TensorUse] = {}
        for use in self._tensor_uses():
            known = first.setdefault(use.tensor, use)
            where = f"in ensemble '{name}', ensemble tensor '{use.tensor}':"
            if use.datatype != known.datatype:
                raise InvalidArgument(
                    f"{where} inconsistent data type: {known.datatype.config_name} is inferred from model "
                    f"'{known.model}' while {use.datatype.config_name} is inferred from model '{use.model}'"
                )
            if not dims_agree(use.dims, known.dims) and not dims_agree(use.full_dims, known.full_dims):
                raise InvalidArgument(
                    f"{where} inconsistent shape: {list(known.full_dims)} is inferred from model "
                    f"'{known.model}' while {list(use.full_dims)} is inferred from model '{use.model}'"
                )

    def _tensor_uses(self) -> Iterator[_TensorUse]:
        """Yield the ensemble's inputs and outputs, then the inputs and outputs of its steps."""
        own = Signature(self.context.config)
        for spec in (*own.inputs.values(), *own.outputs.values()):
            dims = spec.dims if spec.reshape is None else spec.reshape
            yield _TensorUse(spec.name, self.context.name, spec.datatype, dims, self._graph.batches)
        for step in self._graph.steps:
            signature = self._find_model(step.model, step.version).signature
            batches = signature.max_batch_size > 0
            for tensors, specs in ((step.inputs, signature.inputs), (step.outputs, signature.outputs)):
                for name, tensor in tensors.items():
                    spec = specs[name]
                    yield _TensorUse(tensor, step.model, spec.datatype, spec.dims, batches)

    def _check_decoupled_steps(self) -> None:
        """Raise `InvalidArgument` if a step, or the response, needs tensors of two independent decoupled steps.

        Which of their responses belong together would not be defined.
        """
        # The decoupled steps that each tensor depends on, from the outermost to the innermost.
        origins: dict[str, tuple[int, ...]] = dict.fromkeys(self._graph.inputs, ())
        pending = list(self._graph.steps)
        while pending:
            for step in [step for step in pending if origins.keys() >= set(step.inputs.values())]:
                origin = self._common_origin(step.model, [origins[name] for name in step.inputs.values()])
                if self._find_model(step.model, step.version).decoupled:
                    origin = (*origin, step.index)
                origins.update(dict.fromkeys(step.outputs.values(), origin))
                pending.remove(step)
        self._common_origin(self.context.name, [origins[name] for name in self._graph.outputs])

    def _common_origin(self, model: str, origins: list[tuple[int, ...]]) -> tuple[int, ...]:
        innermost = max(origins, key=len, default=())
        if any(innermost[: len(origin)] != origin for origin in origins):
            raise InvalidArgument(
                f"in ensemble '{self.context.name}', step of model '{model}' receives inputs originated from "
                "different decoupled models"
            )
        return innermost

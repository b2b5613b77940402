"""Dataflow graph of an ensemble's steps, compiled from its configuration."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from neso.server.errors import InvalidArgument


@dataclass(frozen=True, slots=True)
class Step:
    """One step. `inputs`, `outputs`: the model's tensor name -> the ensemble's tensor name."""

    index: int
    model: str
    version: str
    inputs: dict[str, str]
    outputs: dict[str, str]


class EnsembleGraph:
    """The validated steps of an ensemble. Each tensor has one producer: the request or a step.

    Raises `InvalidArgument` for an invalid graph.
    """

    def __init__(self, config: Any) -> None:
        self.name: str = config.name
        self.inputs = frozenset(tensor.name for tensor in config.input)
        self.outputs = tuple(tensor.name for tensor in config.output)
        self.batches: bool = config.max_batch_size > 0
        # As the ensemble's response has them before `Signature.restore`.
        self.output_dims = {
            tensor.name: tuple(tensor.reshape.shape if tensor.HasField("reshape") else tensor.dims)
            for tensor in config.output
        }
        self.max_inflight = int(getattr(config.ensemble_scheduling, "max_inflight_requests", 0))
        self.steps = tuple(
            Step(
                index,
                step.model_name,
                "" if step.model_version in (0, -1) else str(step.model_version),
                dict(step.input_map),
                dict(step.output_map),
            )
            for index, step in enumerate(config.ensemble_scheduling.step)
        )
        self.consumers: dict[str, list[Step]] = {}
        for step in self.steps:
            for tensor in set(step.inputs.values()):
                self.consumers.setdefault(tensor, []).append(step)
        self._producers = self._find_producers()
        self._check()

    def producer(self, tensor: str) -> Step | None:
        """Return the step that produces a tensor; None for an input of the ensemble."""
        return self._producers.get(tensor)

    def steps_for(self, outputs: Iterable[str]) -> frozenset[int]:
        """Return the indices of the steps that the ensemble outputs depend on."""
        needed: set[int] = set()
        pending = list(outputs)
        while pending:
            step = self._producers.get(pending.pop())
            if step is not None and step.index not in needed:
                needed.add(step.index)
                pending.extend(step.inputs.values())
        return frozenset(needed)

    def _find_producers(self) -> dict[str, Step]:
        producers: dict[str, Step] = {}
        for step in self.steps:
            for tensor in step.outputs.values():
                if tensor in self.inputs or tensor in producers:
                    raise InvalidArgument(
                        f"in ensemble '{self.name}', tensor '{tensor}' can have only one producer: it is "
                        f"produced by step {step.index} ('{step.model}') a second time"
                    )
                producers[tensor] = step
        return producers

    def _check(self) -> None:
        if not self.steps:
            raise InvalidArgument(f"must specify 'step' for ensemble '{self.name}'")
        for step in self.steps:
            if not step.model:
                raise InvalidArgument(
                    f"must specify 'model_name' in step {step.index} of ensemble '{self.name}'"
                )
            for kind, mapped in (("input_map", step.inputs), ("output_map", step.outputs)):
                if not mapped:
                    raise InvalidArgument(
                        f"must specify '{kind}' in step {step.index} of ensemble '{self.name}'"
                    )
            for tensor in step.inputs.values():
                if tensor not in self.inputs and tensor not in self._producers:
                    raise InvalidArgument(
                        f"in ensemble '{self.name}', tensor '{tensor}', which step {step.index} ('{step.model}') "
                        "reads, is neither an input of the ensemble nor produced by a step"
                    )
        for tensor in self.outputs:
            if tensor not in self._producers and tensor not in self.inputs:
                raise InvalidArgument(f"in ensemble '{self.name}', no step produces the output '{tensor}'")
        self._check_cycles()

    def _check_cycles(self) -> None:
        known, left = set(self.inputs), list(self.steps)
        while left:
            ready = [step for step in left if known.issuperset(step.inputs.values())]
            if not ready:
                raise InvalidArgument(
                    f"in ensemble '{self.name}', steps wait for each other in a cycle: "
                    + ", ".join(f"{step.index} ('{step.model}')" for step in left)
                )
            for step in ready:
                known.update(step.outputs.values())
                left.remove(step)

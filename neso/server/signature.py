"""Input and output tensors of a model: request checks and output shapes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from neso.server.errors import InvalidArgument
from neso.server.inference_request import InferenceRequest
from neso.server.metadata import TensorMetadata
from neso.server.repository.names import is_inside
from neso.server.tensor import DataType, Tensor, element_count

MAX_CLASSES = 1_000_000
"""Maximum number of elements of a batch entry of a classified output, as in Triton."""


class Classifier:
    """Converts outputs of one model version to classification results. `labels`: by output and index."""

    def __init__(
        self, config: Any, directory: Path, inherited: Mapping[str, Sequence[str]] = MappingProxyType({})
    ) -> None:
        """Read the label files in the model's folder. Raises `InvalidArgument`.

        `inherited`: labels of outputs without a label file.
        """
        self._batched = config.max_batch_size > 0
        self.labels: dict[str, Sequence[str]] = {**inherited}
        for output in config.output:
            if output.label_filename:
                self.labels[output.name] = _read_labels(directory, output.label_filename, config.name)

    def classify(self, outputs: list[Tensor], counts: Mapping[str, int]) -> list[Tensor]:
        """Replace each output in `counts` by its `counts[name]` top classes. Raises `InvalidArgument`."""
        return [
            self._classes(tensor, counts[tensor.name]) if tensor.name in counts else tensor
            for tensor in outputs
        ]

    def _classes(self, tensor: Tensor, count: int) -> Tensor:
        """Return a BYTES tensor [batch, n], or [n] without batching; n is at most the size of one batch entry.

        Elements are "value:index" or "value:index:label", largest value first; equal values by ascending index.
        """
        check_datatype(tensor.datatype)
        batch = tensor.shape[:1] if self._batched else ()
        size = element_count(tensor.shape[len(batch) :])
        if size > MAX_CLASSES:
            raise InvalidArgument("classification output tensor too large")
        count = min(count, size)
        labels = self.labels.get(tensor.name, ())
        rows = batch[0] if batch else 1
        texts = np.empty((rows, count), np.object_)
        for row, values in zip(texts, tensor.array.reshape(rows, size), strict=True):
            row[:] = [_class_text(values[i], int(i), labels) for i in largest(values, count)]
        return Tensor(tensor.name, DataType.BYTES, texts.reshape(*batch, count))


def check_datatype(datatype: DataType) -> None:
    """Raise `InvalidArgument` (with Triton's message) for datatypes that cannot be ordered."""
    if datatype in (DataType.BYTES, DataType.BOOL):
        raise InvalidArgument(
            f"class result not available for output due to unsupported type '{datatype.value}'"
        )


def largest(values: npt.NDArray[Any], count: int) -> npt.NDArray[np.intp]:
    """Return the indices of the `count` largest elements of `values` [n], in descending order. NaN is the smallest."""
    if values.dtype.kind not in "iu":  # float64 represents all float types exactly
        values = values.astype(np.float64)
        values = np.where(np.isnan(values), -np.inf, values)
    # Reversed twice, so that the stable ascending sort puts the smaller index first among equals.
    backwards = np.argsort(values[::-1], kind="stable")[::-1][:count]
    return len(values) - 1 - backwards


def _class_text(value: Any, index: int, labels: Sequence[str]) -> bytes:
    """Format a value like C++'s `std::to_string`: floats with six decimals."""
    number = str(value) if isinstance(value, np.integer) else f"{float(value):f}"
    text = f"{number}:{index}"
    label = labels[index] if index < len(labels) else ""
    return (f"{text}:{label}" if label else text).encode()


def _read_labels(directory: Path, filename: str, model: str) -> list[str]:
    """Read one label per line; an empty line means no label for that index. The file must be in `directory`."""
    if not is_inside(filename):
        raise InvalidArgument(
            f"label file '{filename}' of model '{model}' must stay inside the model's folder"
        )
    try:
        text = (directory / filename).read_text(encoding="utf-8")
        return [line.rstrip("\r") for line in text.removesuffix("\n").split("\n")]
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgument(f"unable to read the label file of model '{model}': {error}") from None


Shape = tuple[int, ...]


def fits(shape: Shape, dims: Shape) -> bool:
    """Return whether a shape matches `dims`, where -1 allows any extent."""
    if len(shape) != len(dims):
        return False
    for expected, extent in zip(dims, shape, strict=True):  # noqa: SIM110  faster than `all`
        if expected not in (-1, extent):
            return False
    return True


def dims_agree(one: Shape, other: Shape) -> bool:
    """Return whether a shape can match both `dims`, where -1 allows any extent."""
    return len(one) == len(other) and all(a == b or -1 in (a, b) for a, b in zip(one, other, strict=True))


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One input or output of a model. `dims` excludes the batch dimension; -1 is variable.

    `reshape`: shape passed to the backend instead of `dims`; None if it is the same.
    """

    name: str
    datatype: DataType
    dims: Shape
    optional: bool = False
    reshape: Shape | None = None

    @classmethod
    def of(cls, tensor: Any) -> TensorSpec:
        """Convert a `ModelInput` or `ModelOutput` message."""
        return cls(
            tensor.name,
            DataType.of_message(tensor),
            tuple(tensor.dims),
            bool(getattr(tensor, "optional", False)),
            tuple(tensor.reshape.shape) if tensor.HasField("reshape") else None,
        )

    def matches(self, shape: Shape) -> bool:
        """Return whether a shape (without the batch dimension) matches `dims`."""
        return fits(shape, self.dims)


class Signature:
    """The inputs and outputs of one model, compiled from its configuration for fast checks.

    `reshapes`: False if another process, which executes the model, reshapes its inputs and outputs.
    """

    def __init__(self, config: Any, reshapes: bool = True) -> None:
        self.model = config.name
        self.max_batch_size = int(config.max_batch_size)
        self.inputs = {tensor.name: TensorSpec.of(tensor) for tensor in config.input}
        self.outputs = {tensor.name: TensorSpec.of(tensor) for tensor in config.output}
        # Ragged inputs: shapes can differ within a batch; the batch contains them flattened and concatenated.
        self.ragged = frozenset(
            tensor.name for tensor in config.input if tensor.allow_ragged_batch and self.max_batch_size
        )
        self._required = sum(not spec.optional for spec in self.inputs.values())
        self._has_optional = self._required < len(self.inputs)
        # Inputs of variable shape, whose shapes must be equal within a batch.
        self._variable = [
            tensor.name for tensor in config.input if -1 in tensor.dims and not tensor.allow_ragged_batch
        ]
        self._reshaped_inputs = [
            name for name, spec in self.inputs.items() if reshapes and spec.reshape is not None
        ]
        self._reshaped_outputs = {
            name for name, spec in self.outputs.items() if reshapes and spec.reshape is not None
        }
        self.reshapes_outputs = bool(self._reshaped_outputs)  # whether `restore` changes anything

    def metadata(self, specs: dict[str, TensorSpec]) -> list[TensorMetadata]:
        """Return the metadata of `specs`, with the batch dimension."""
        batch = (-1,) if self.max_batch_size else ()
        return [TensorMetadata(spec.name, spec.datatype.value, batch + spec.dims) for spec in specs.values()]

    def check(self, request: InferenceRequest) -> int:
        """Check the tensors of a request and reshape them for the backend. Returns the batch size, at least 1.

        Raises `InvalidArgument` with Triton's messages.
        """
        batch_size = self.validate(request)
        for name in self._reshaped_inputs:
            if name in request.inputs:
                spec = self.inputs[name]
                assert spec.reshape is not None
                request.inputs[name] = self._reshape(request.inputs[name], spec.dims, spec.reshape)
        return batch_size

    def validate(self, request: InferenceRequest) -> int:
        """Check the tensors of a request without changing them. Returns the batch size. Thread-safe."""
        return self._check_plain(request) or self._check_each(request)

    def _check_plain(self, request: InferenceRequest) -> int:
        """Fast path: return the batch size of a plain valid request, or 0 if the full check is needed."""
        inputs, specs = request.inputs, self.inputs
        if request.classification:
            return 0
        requested = request.requested_outputs
        for name in requested:
            if name not in self.outputs:
                return 0
        if len(requested) > 1 and len(set(requested)) < len(requested):
            return 0
        first = 1 if self.max_batch_size else 0
        batch_size, required = 0, 0
        for name, tensor in inputs.items():
            spec, shape = specs.get(name), tensor.array.shape
            if spec is None or tensor.datatype is not spec.datatype or len(shape) != len(spec.dims) + first:
                return 0
            if first:
                if batch_size and shape[0] != batch_size:
                    return 0
                batch_size = shape[0]
            if shape[first:] != spec.dims and not fits(shape[first:], spec.dims):
                return 0
            required += not spec.optional
        if required != self._required:
            return 0
        if not first:
            return 1
        return batch_size if batch_size <= self.max_batch_size else 0

    def _check_each(self, request: InferenceRequest) -> int:
        try:
            self._check_names(request)
            batch_size = self._batch_size(request.inputs)
            for name, tensor in request.inputs.items():
                self._check_tensor(self.inputs[name], tensor)
        except InvalidArgument as error:
            raise InvalidArgument(f"[request id: {request.id or '<id_unknown>'}] {error.message}") from None
        return batch_size

    def batches_with(self, request: InferenceRequest, other: InferenceRequest) -> bool:
        """Return whether two checked requests can be executed as one batch: same inputs with the same shapes."""
        if self._has_optional and request.inputs.keys() != other.inputs.keys():
            return False
        return not self._variable or all(
            request.inputs[name].shape[1:] == other.inputs[name].shape[1:]
            for name in self._variable
            if name in request.inputs
        )

    def restore(self, outputs: list[Tensor]) -> list[Tensor]:
        """Reshape backend outputs to the shapes of the configuration."""
        if not self._reshaped_outputs:
            return outputs
        restored = []
        for tensor in outputs:
            spec = self.outputs.get(tensor.name)
            if spec is not None and spec.reshape is not None:
                tensor = self._reshape(tensor, spec.reshape, spec.dims)
            restored.append(tensor)
        return restored

    def _check_names(self, request: InferenceRequest) -> None:
        requested: set[str] = set()
        for name in request.requested_outputs:
            if name in requested:
                raise InvalidArgument(f"output '{name}' already exists in request")
            requested.add(name)
            if name not in self.outputs:
                raise InvalidArgument(f"unexpected inference output '{name}' for model '{self.model}'")
        for name in request.classification:
            if name in self.outputs:
                check_datatype(self.outputs[name].datatype)
        given, most = len(request.inputs), len(self.inputs)
        absent = [n for n, spec in self.inputs.items() if not spec.optional and n not in request.inputs]
        missing = ""
        if absent:
            missing = (
                f". Got input(s) {_quoted(request.inputs)}, but missing required input(s) {_quoted(absent)}. "
                "Please provide all required input(s)."
            )
        if given > most or given < self._required:
            expected = f"number of inputs between {self._required} and {most}"
            if self._required == most:
                expected = f"{most} inputs"
            raise InvalidArgument(
                f"expected {expected} but got {given} inputs for model '{self.model}'{missing}"
            )
        for name in request.inputs:
            if name not in self.inputs:
                raise InvalidArgument(f"unexpected inference input '{name}' for model '{self.model}'")
        if absent:
            raise InvalidArgument(
                f"expected {self._required} required inputs but got {self._required - len(absent)} for "
                f"model '{self.model}'{missing}"
            )

    def _batch_size(self, inputs: dict[str, Tensor]) -> int:
        if self.max_batch_size == 0:
            return 1
        batch_size: int | None = None
        for name, tensor in inputs.items():
            if not tensor.shape:
                raise InvalidArgument(
                    f"input '{name}' has no shape but model requires batch dimension for '{self.model}'"
                )
            if batch_size is None:
                batch_size = tensor.shape[0]
            elif tensor.shape[0] != batch_size:
                raise InvalidArgument(
                    f"input '{name}' batch size does not match other inputs for '{self.model}'"
                )
        batch_size = batch_size or 0
        if batch_size > self.max_batch_size:
            raise InvalidArgument(
                f"inference request batch-size must be <= {self.max_batch_size} for '{self.model}'"
            )
        return max(batch_size, 1)

    def _check_tensor(self, spec: TensorSpec, tensor: Tensor) -> None:
        if tensor.datatype is not spec.datatype:
            raise InvalidArgument(
                f"inference input '{tensor.name}' data-type is '{tensor.datatype.value}', but model "
                f"'{self.model}' expects '{spec.datatype.value}'"
            )
        batched = self.max_batch_size > 0
        if not spec.matches(tensor.shape[1:] if batched else tensor.shape):
            expected = (-1, *spec.dims) if batched else spec.dims
            raise InvalidArgument(
                f"unexpected shape for input '{spec.name}' for model '{self.model}'. Expected "
                f"{_shape_text(expected)}, got {_shape_text(tensor.shape)}"
            )

    def _reshape(self, tensor: Tensor, dims: Shape, shape: Shape) -> Tensor:
        first = 1 if self.max_batch_size else 0
        varying = iter(
            extent for extent, expected in zip(tensor.shape[first:], dims, strict=False) if expected == -1
        )
        try:
            new = tuple(next(varying) if extent == -1 else extent for extent in shape)
            return Tensor(tensor.name, tensor.datatype, tensor.array.reshape(tensor.shape[:first] + new))
        except (StopIteration, RuntimeError, ValueError):
            raise InvalidArgument(
                f"tensor '{tensor.name}' of model '{self.model}' has shape {_shape_text(tensor.shape)}, which can "
                f"not be reshaped to {_shape_text(shape)}"
            ) from None


def _shape_text(shape: Shape) -> str:
    return "[" + ",".join(str(extent) for extent in shape) + "]"


def _quoted(names: Iterable[str]) -> str:
    return "[" + ",".join(f"'{name}'" for name in names) + "]"

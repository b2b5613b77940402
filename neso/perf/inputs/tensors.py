"""Requests to tensor models: values generated from the model's metadata, or read from a file of perf_analyzer."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import orjson

from neso.perf.errors import PerfError
from neso.perf.inputs.options import InputOptions
from neso.perf.requests import PerfRequest, SharedTensor

_KINDS: dict[str, Any] = {
    "BOOL": np.bool_, "UINT8": np.uint8, "UINT16": np.uint16, "UINT32": np.uint32, "UINT64": np.uint64,
    "INT8": np.int8, "INT16": np.int16, "INT32": np.int32, "INT64": np.int64, "FP16": np.float16,
    "FP32": np.float32, "FP64": np.float64, "BF16": ml_dtypes.bfloat16, "BYTES": np.object_,
}  # fmt: skip
_LETTERS = np.frombuffer(b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789", np.uint8)


@dataclass(frozen=True)
class TensorSpec:
    """An input of a model: KServe datatype, and shape with -1 for variable dimensions."""

    name: str
    datatype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class TensorSource:
    """Requests with one array for each input.

    With `max_batch_size` above 0, the first dimension of each input is the batch, as in Triton's metadata. Requests
    to a model with sequences (`is_sequence`) belong to sessions of `--sequence-length` turns.
    """

    specs: tuple[TensorSpec, ...]
    options: InputOptions
    max_batch_size: int = 0
    is_sequence: bool = False

    def requests(self) -> Iterator[PerfRequest]:
        """Yield the requests. Raises `PerfError` for unknown datatypes, missing shapes and invalid files."""
        shapes = self._shapes()
        if self.options.tensor_data in ("random", "zero"):
            rng = np.random.default_rng(self.options.random_seed)
            number = 1 if self.options.tensor_data == "zero" else self.options.num_entries
            length = self.options.sequence_length
            for position in range(max(number, length) if self.is_sequence else number):
                yield PerfRequest(
                    tensors={spec.name: self._generated(spec, shapes, rng) for spec in self.specs},
                    session=f"sequence-{position // length}" if self.is_sequence else "",
                    turn=position % length if self.is_sequence else 0,
                )
        else:
            yield from self._of_file(Path(self.options.tensor_data), shapes)

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of each input, with variable dimensions from `--shape`."""
        given = parse_shapes(self.options.tensor_shapes)
        names = {spec.name for spec in self.specs}
        if unknown := given.keys() - names:
            raise PerfError(
                f"--shape: the model has no input {', '.join(unknown)}; it has {', '.join(names)}"
            )
        batch = self.options.batch_size_text
        if batch > max(1, self.max_batch_size):
            raise PerfError(
                f"--batch-size-text {batch}: the model takes at most {max(1, self.max_batch_size)}"
            )
        found = {}
        for spec in self.specs:
            if spec.datatype not in _KINDS:
                raise PerfError(f"input {spec.name} has the unknown datatype {spec.datatype}")
            shape = spec.shape[1:] if self.max_batch_size else spec.shape
            if spec.name in given:
                if not _fits(given[spec.name], shape):
                    raise PerfError(
                        f"--shape {spec.name}: {list(given[spec.name])} does not fit {list(shape)} of the model"
                    )
                shape = given[spec.name]
            if -1 in shape:
                raise PerfError(
                    f"input {spec.name} has shape {list(shape)}: give the dimensions by --shape {spec.name}:…"
                )
            found[spec.name] = (batch, *shape) if self.max_batch_size else shape
        return found

    def _generated(
        self, spec: TensorSpec, shapes: dict[str, tuple[int, ...]], rng: np.random.Generator
    ) -> np.ndarray:
        shape, kind = shapes[spec.name], _KINDS[spec.datatype]
        zero = self.options.tensor_data == "zero"
        if spec.datatype == "BYTES":
            number = int(np.prod(shape))
            if self.options.string_data is not None:
                texts = [self.options.string_data.encode()] * number
            elif zero:
                texts = [b""] * number
            else:
                length = self.options.string_length
                texts = [rng.choice(_LETTERS, length).tobytes() for _ in range(number)]
            array = np.empty(number, np.object_)
            array[:] = texts
            return array.reshape(shape)
        if zero:
            return np.zeros(shape, kind)
        if spec.datatype == "BOOL":
            return rng.integers(0, 2, shape).astype(kind)
        if np.issubdtype(kind, np.integer):
            # Integers are often indexes: small values are valid for most models.
            return rng.integers(0, min(128, int(np.iinfo(kind).max)), shape).astype(kind)
        return rng.random(shape).astype(kind)

    def _of_file(self, path: Path, shapes: dict[str, tuple[int, ...]]) -> Iterator[PerfRequest]:
        try:
            streams = orjson.loads(path.read_bytes())["data"]
        except OSError as error:
            raise PerfError(
                f"--input-data {path}: {error.strerror}; expected random, zero or a file"
            ) from None
        except (ValueError, KeyError, TypeError):
            raise PerfError(f'--input-data {path}: expected JSON {{"data": [{{"INPUT": […]}}]}}') from None
        for number, stream in enumerate(streams):
            steps = stream if isinstance(stream, list) else [stream]
            session = f"session-{number}" if isinstance(stream, list) or self.is_sequence else ""
            for turn, step in enumerate(steps):
                tensors: dict[str, np.ndarray | SharedTensor] = {}
                for spec in self.specs:
                    if not isinstance(step, dict) or spec.name not in step:
                        raise PerfError(f"--input-data {path}, entry {number}: input {spec.name} is missing")
                    tensors[spec.name] = _array(
                        step[spec.name], spec, shapes[spec.name], f"{path}, entry {number}"
                    )
                yield PerfRequest(tensors=tensors, session=session, turn=turn)


def parse_shapes(texts: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """Parse NAME:D1,D2,… values of `--shape`. Raises `PerfError`."""
    found = {}
    for text in texts:
        name, _, dims = text.rpartition(":")
        try:
            shape = tuple(int(dim) for dim in dims.split(","))
        except ValueError:
            shape = (-1,)
        if not name or min(shape) < 0:
            raise PerfError(f"--shape {text}: expected NAME:D1,D2,… with positive dimensions")
        found[name] = shape
    return found


def _fits(shape: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    return len(shape) == len(wanted) and all(b in (-1, a) for a, b in zip(shape, wanted, strict=True))


def _array(value: Any, spec: TensorSpec, shape: tuple[int, ...], where: str) -> np.ndarray:
    """Return the array of a value: a list, {"content": […], "shape": […]}, or {"b64": …}."""
    if isinstance(value, dict):
        batch = shape[:1] if len(value.get("shape", shape)) < len(shape) else ()
        shape = (*batch, *(int(dim) for dim in value["shape"])) if "shape" in value else shape
        content = value.get("content", value)
    else:
        content = value
    try:
        if isinstance(content, dict):
            raw = base64.b64decode(content["b64"])
            if spec.datatype == "BYTES":
                content = [raw]
            else:
                return np.frombuffer(raw, _KINDS[spec.datatype]).reshape(shape)
        if spec.datatype == "BYTES":
            array = np.empty(len(content), np.object_)
            array[:] = [text.encode() if isinstance(text, str) else bytes(text) for text in content]
            return array.reshape(shape)
        return np.array(content, _KINDS[spec.datatype]).reshape(shape)
    except (ValueError, TypeError, KeyError, OverflowError) as error:
        raise PerfError(f"--input-data {where}: input {spec.name}: {error}") from None

"""System shared memory for the tensors of KServe requests, as with perf_analyzer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import accumulate
from multiprocessing.shared_memory import SharedMemory

from neso.perf.client.grpc import grpc_register, grpc_unregister
from neso.perf.endpoints.kserve import (
    ModelMetadata,
    byte_size,
    encode_tensor,
    http_register,
    http_unregister,
)
from neso.perf.endpoints.options import EndpointOptions
from neso.perf.errors import PerfError
from neso.perf.requests import PerfRequest, SharedTensor

_ALIGNMENT = 64
"""Offsets of tensors are multiples of this number of bytes."""


@contextmanager
def shared_requests(
    options: EndpointOptions,
    metadata: ModelMetadata,
    requests: Sequence[PerfRequest],
    *,
    batch: int,
    output_size: int,
) -> Iterator[list[PerfRequest]]:
    """Yield the requests with their tensors in shared memory that is registered with the servers.

    One region has the inputs of all requests. Another has room for each output of the model, where the responses of
    all requests are written; outputs whose size the metadata does not tell have `output_size` bytes. `batch`: first
    dimension of the tensors of a model with batches. Raises `PerfError` if a server rejects the regions.
    """
    arrays = [array for request in requests for array in request.arrays.values()]
    contents = [encode_tensor(array) for array in arrays]
    output_sizes = [
        byte_size(spec, metadata.max_batch_size and batch) or output_size for spec in metadata.outputs
    ]
    with ExitStack() as stack:
        inputs = stack.enter_context(_registered(options, [len(data) for _, data in contents]))
        outputs = stack.enter_context(_registered(options, output_sizes))
        for (_, data), (offset, size) in zip(contents, inputs.places, strict=True):
            inputs.content[offset : offset + size] = data
        tensors = iter(
            SharedTensor(inputs.memory.name, *place, datatype, array.shape)
            for (datatype, _), array, place in zip(contents, arrays, inputs.places, strict=True)
        )
        results = {
            name: SharedTensor(outputs.memory.name, *place, datatype, ())
            for (name, datatype, _), place in zip(metadata.outputs, outputs.places, strict=True)
        }
        yield [
            replace(
                request,
                tensors={name: next(tensors) for name in request.arrays},
                shared_outputs=results,
            )
            for request in requests
        ]


class _Region:
    """Shared memory with places, (offset, size) in bytes, for tensors of given sizes."""

    def __init__(self, sizes: Sequence[int]) -> None:
        ends = accumulate(-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes)
        starts = [0, *ends]
        self.places = list(zip(starts, sizes, strict=False))
        self.memory = SharedMemory(create=True, size=max(1, starts[-1]))

    @property
    def content(self) -> memoryview:
        """The bytes of the region."""
        assert self.memory.buf is not None  # until it is closed
        return self.memory.buf


@contextmanager
def _registered(options: EndpointOptions, sizes: Sequence[int]) -> Iterator[_Region]:
    """Create a region, and register it under its name with the servers. Raises `PerfError`."""
    try:
        region = _Region(sizes)
    except OSError as error:
        raise PerfError(f"--shared-memory: no memory of {sum(sizes):,} bytes: {error}") from None
    register, unregister = (
        (grpc_register, grpc_unregister) if options.is_grpc else (http_register, http_unregister)
    )
    name, size = region.memory.name, region.memory.size
    try:
        register(options, name, size)
        yield region
    finally:
        unregister(options, name)
        region.memory.close()
        region.memory.unlink()

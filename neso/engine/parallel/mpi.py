"""Communicator of MPI ranks, by mpi4py. Import it only in rank processes: MPI can be initialized once per process.

Any MPI library that mpi4py finds works: Open MPI, MPICH and its derivatives, from PyPI, the system or a cluster.
"""

from __future__ import annotations

import ctypes
import os
import time
from pathlib import Path
from typing import Any

import mpi4py
import numpy as np

mpi4py.rc.initialize = False
mpi4py.rc.finalize = False
from mpi4py import MPI  # noqa: E402

import neso._native as _native  # noqa: E402
from neso.engine.parallel.communicator import (  # noqa: E402
    SEGMENT_ALIGNMENT,
    Float32Array,
    aligned_segment,
)
from neso.engine.parallel.layout import RankLayout  # noqa: E402

PIECE = 1 << 18
"""Floats that ranks on one host exchange at once: two places of 1 MiB each per rank, which stay in the caches."""

_removed: list[Path] = []
"""Files in shared memory that have been removed while they are in use."""
_YIELD_AFTER, _SLEEP_AFTER, _LONGEST_SLEEP = 50e-6, 2e-3, 1e-3
"""Seconds after which a waiting rank yields its core, after which it sleeps, and how long at most."""


def library_version() -> str:
    """Return name and version of the MPI library. Does not initialize it."""
    return " ".join(MPI.Get_library_version().splitlines()[0].replace("\t", " ").split()).strip(",\0 ")


class MpiCommunicator:
    """See `Communicator`. All ranks of the layout must create it; raises `RuntimeError` if their numbers do not fit.

    Within a host, sums go through shared memory of MPI; `shared_memory` False uses MPI_Allreduce there too.
    """

    def __init__(self, layout: RankLayout, *, shared_memory: bool = True) -> None:
        mapped = _mapped_segments()
        if not MPI.Is_initialized():
            # Any thread of the step may call MPI, but never two at once.
            MPI.Init_thread(MPI.THREAD_SERIALIZED)
        if MPI.Query_thread() < MPI.THREAD_SERIALIZED:
            raise RuntimeError(f"{library_version()} does not support MPI_THREAD_SERIALIZED")
        self.layout = layout
        self._world = MPI.COMM_WORLD.Dup()
        if (self._world.rank, self._world.size) != (layout.rank, layout.size):
            raise RuntimeError(
                f"MPI says that this is rank {self._world.rank} of {self._world.size}, "
                f"the engine that it is rank {layout.rank} of {layout.size}"
            )
        self._group = self._world.Split(layout.stage, layout.tp_rank)
        self._window: Any = None
        self._widths: list[int] | None = None
        self.native_all_reduce = self._make_all_reduce(shared_memory)
        """Sums inside a step of the native runner; None without tensor parallelism."""
        self._world.alltoall([0] * layout.size)  # opens the connections that the library opens on first use
        self._world.Barrier()
        for path in _mapped_segments() - mapped:
            # All ranks have mapped it. A killed rank would leave it behind.
            path.unlink(missing_ok=True)
            _removed.append(path)

    def all_reduce(self, values: Float32Array) -> None:
        if self.native_all_reduce is not None:
            self.native_all_reduce.sum(values.reshape(-1))

    def gather(self, values: Float32Array) -> list[Float32Array] | None:
        if self.layout.tensor_parallel == 1:
            return [values]
        values = np.ascontiguousarray(values)
        if self._widths is None:
            self._widths = self._group.allgather(values.shape[1])
        if self.layout.tp_rank:
            _wait(self._group.Igatherv(values, None))
            return None
        rows = len(values)
        counts = [rows * width for width in self._widths]
        gathered = np.empty(sum(counts), np.float32)
        _wait(self._group.Igatherv(values, [gathered, counts]))
        parts = np.split(gathered, np.cumsum(counts)[:-1])
        return [part.reshape(rows, width) for part, width in zip(parts, self._widths, strict=True)]

    def send(self, values: Float32Array, rank: int) -> None:
        _wait(self._world.Isend(values, rank))

    def receive(self, values: Float32Array, rank: int) -> None:
        _wait(self._world.Irecv(values, rank))

    def barrier(self) -> None:
        _wait(self._world.Ibarrier())

    def _make_all_reduce(self, shared_memory: bool) -> _native.AllReduce | None:
        if self.layout.tensor_parallel == 1:
            return None
        host = self._group.Split_type(MPI.COMM_TYPE_SHARED, self.layout.tp_rank)
        if shared_memory and host.size == self._group.size:
            return self._make_shared(host)
        return _native.MpiAllReduce(
            _allreduce_address(),
            int(MPI.IN_PLACE),
            _handle(MPI.FLOAT),
            _handle(MPI.SUM),
            _handle(self._group),
        )

    def _make_shared(self, host: Any) -> _native.AllReduce:
        size = -(-_native.SharedAllReduce.segment_bytes(PIECE) // 4096) * 4096
        info = MPI.Info.Create({"alloc_shared_noncontig": "true"})
        self._window = MPI.Win.Allocate_shared(size + SEGMENT_ALIGNMENT, 1, info, host)
        segments = [aligned_segment(self._window.Shared_query(rank)[0], size) for rank in range(host.size)]
        segments[host.rank][...] = 0  # also places the pages on the rank's own NUMA node
        host.Barrier()
        return _native.SharedAllReduce(segments, host.rank, PIECE)


def _mapped_segments() -> set[Path]:
    """Return the files in shared memory that this process has mapped and that still have a name."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    names = {line.split(maxsplit=5)[5] for line in lines if "/dev/shm/" in line}
    return {Path(name) for name in names if not name.endswith(" (deleted)")}


def finalize() -> None:
    """Finalize MPI; all ranks must call it."""
    for path in _removed:
        path.touch(0o600)  # Open MPI 4 prints an error if it cannot remove it
    MPI.Finalize()
    for path in _removed:
        path.unlink(missing_ok=True)


def _wait(request: MPI.Request) -> None:
    """Wait for a request: poll, then yield the core, then sleep."""
    begin = time.perf_counter()
    while not request.Test():
        waited = time.perf_counter() - begin
        if waited > _SLEEP_AFTER:
            time.sleep(min(waited / 32, _LONGEST_SLEEP))
        elif waited > _YIELD_AFTER:
            os.sched_yield()


def _allreduce_address() -> int:
    """Return the address of MPI_Allreduce in the library that mpi4py has loaded."""
    address = ctypes.cast(ctypes.CDLL(MPI.__file__).MPI_Allreduce, ctypes.c_void_p).value
    assert address is not None
    return address


def _handle(value: Any) -> int:
    """Return a handle as the library represents it: an integer in MPICH, a pointer in Open MPI."""
    kind = {4: ctypes.c_int, 8: ctypes.c_ssize_t}[MPI._sizeof(value)]
    return kind.from_address(MPI._addressof(value)).value

"""`Communicator` by torch.distributed (gloo), for ranks that torchrun started without MPI."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

import neso._native as _native
from neso.engine.parallel.layout import RankLayout
from neso.engine.runners.torch.ranks import join

Float32Array = npt.NDArray[np.float32]


class TorchCommunicator:
    """Connects the ranks at MASTER_ADDR and MASTER_PORT, for the torch runner and the reference runner.

    The default process group must not exist yet.
    """

    def __init__(self, layout: RankLayout) -> None:
        self.layout = layout
        self.native_all_reduce: _native.AllReduce | None = None
        join(layout, "env://")
        size = layout.tensor_parallel
        stages = [dist.new_group(list(range(first, first + size))) for first in range(0, layout.size, size)]
        self._stage = stages[layout.rank // size]

    def all_reduce(self, values: Float32Array) -> None:
        dist.all_reduce(torch.from_numpy(values), group=self._stage)

    def gather(self, values: Float32Array) -> list[Float32Array] | None:
        own = torch.from_numpy(np.ascontiguousarray(values))
        columns = torch.tensor([own.shape[1]])
        counts = [torch.empty_like(columns) for _ in self.layout.tp_group]
        dist.all_gather(counts, columns, group=self._stage)
        if self.layout.tp_rank:
            dist.send(own, self.layout.tp_group[0])
            return None
        parts = [own.numpy()]
        for rank, count in zip(self.layout.tp_group[1:], counts[1:], strict=True):
            part = torch.empty(own.shape[0], int(count))
            dist.recv(part, rank)
            parts.append(part.numpy())
        return parts

    def send(self, values: Float32Array, rank: int) -> None:
        dist.send(torch.from_numpy(values), rank)

    def receive(self, values: Float32Array, rank: int) -> None:
        dist.recv(torch.from_numpy(values), rank)

    def barrier(self) -> None:
        dist.barrier()

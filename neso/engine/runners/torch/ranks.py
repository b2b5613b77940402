"""Collectives between the ranks of a model on their devices, by torch.distributed.

NCCL on GPUs, gloo on the CPU. All ranks call the same operations in the same order. NCCL's can be captured in CUDA
graphs.
"""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from typing import Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from neso.engine.parallel.communicator import Communicator
from neso.engine.parallel.layout import RankLayout
from neso.engine.parallel.sharding import Shard
from neso.engine.runners.runner_options import UnsupportedOption

_NO_TIMEOUT = timedelta(days=365)
"""Ranks wait for the next step as long as there is no request. A rank that hangs is ended by its supervisor."""

_MAX_ADDRESS = 128
_LOCAL_RANKS = ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID")
"""Environment variables with the index of a rank on its host: of torchrun, Open MPI, MPICH and Slurm."""


class Ranks(Protocol):
    """Collectives of one step."""

    def sum(self, x: Tensor) -> None:
        """Replace contiguous x by its sum over the tensor-parallel ranks."""

    def gather(self, logits: Tensor) -> Tensor:
        """Return the columns of all tensor-parallel ranks, [R, vocab_size], on the first one; elsewhere no rows."""

    def send(self, x: Tensor) -> None:
        """Send the hidden states of a stage, [T, hidden], to the next stage."""

    def receive(self, num_tokens: int, dtype: torch.dtype) -> Tensor:
        """Return the hidden states of the previous stage, [T, hidden]."""


class SingleRank:
    """The collectives of a model on one rank: none."""

    def sum(self, x: Tensor) -> None:
        """Do nothing: one rank has the sum."""

    def gather(self, logits: Tensor) -> Tensor:
        return logits

    def send(self, x: Tensor) -> None:
        raise RuntimeError("a single rank has no next stage")

    def receive(self, num_tokens: int, dtype: torch.dtype) -> Tensor:
        raise RuntimeError("a single rank has no previous stage")


class UnconnectedRanks:
    """Stands for the other ranks until `connect`; every operation raises `RuntimeError`."""

    def sum(self, x: Tensor) -> None:
        raise self._error()

    def gather(self, logits: Tensor) -> Tensor:
        raise self._error()

    def send(self, x: Tensor) -> None:
        raise self._error()

    def receive(self, num_tokens: int, dtype: torch.dtype) -> Tensor:
        raise self._error()

    def _error(self) -> RuntimeError:
        return RuntimeError("connect must come before the first step of a runner on several ranks")


class DeviceRanks:
    """Collectives of a shard by torch.distributed, in the group of its stage and with the neighbouring stages."""

    def __init__(
        self, shard: Shard, device: torch.device, everyone: dist.ProcessGroup, stage: dist.ProcessGroup
    ) -> None:
        self._layout = shard.layout
        self._device = device
        self._everyone, self._stage = everyone, stage
        self._widths = shard.vocabulary_sizes
        self._hidden_size = shard.whole.hidden_size

    @classmethod
    def open(cls, shard: Shard, device: torch.device, communicator: Communicator) -> DeviceRanks:
        """Create the process groups. All ranks call this at the same time.

        The ranks meet at MASTER_ADDR and MASTER_PORT, which torchrun sets, or at a free port of rank 0.
        """
        layout = shard.layout
        join(layout, None if dist.is_initialized() else meeting_point(layout, communicator))
        backend = "nccl" if device.type == "cuda" else "gloo"
        everyone = dist.new_group(backend=backend, timeout=_NO_TIMEOUT)
        # Every rank takes part in the creation of the group of every stage.
        stages = [dist.new_group(ranks, backend=backend, timeout=_NO_TIMEOUT) for ranks in _stages_of(layout)]
        return cls(shard, device, everyone, stages[layout.rank // layout.tensor_parallel])

    def sum(self, x: Tensor) -> None:
        if self._layout.tensor_parallel > 1:
            dist.all_reduce(x, group=self._stage)

    def gather(self, logits: Tensor) -> Tensor:
        if self._layout.tensor_parallel == 1:
            return logits
        # All parts have the same shape: NCCL gathers them in one operation, which a CUDA graph can contain.
        widest = max(self._widths)
        own = logits.new_zeros(len(logits), widest)
        own[:, : logits.shape[1]] = logits
        parts = [torch.empty_like(own) for _ in self._widths]
        dist.all_gather(parts, own, group=self._stage)
        if self._layout.tp_rank:
            return logits.new_empty(0, sum(self._widths))
        return torch.cat([part[:, :width] for part, width in zip(parts, self._widths, strict=True)], dim=1)

    def send(self, x: Tensor) -> None:
        dist.send(x.contiguous(), self._layout.next, group=self._everyone)

    def receive(self, num_tokens: int, dtype: torch.dtype) -> Tensor:
        x = torch.empty(num_tokens, self._hidden_size, dtype=dtype, device=self._device)
        dist.recv(x, self._layout.previous, group=self._everyone)
        return x


def join(layout: RankLayout, address: str | None) -> None:
    """Create the default process group, gloo, at an address of `init_process_group`; None: there is one already."""
    if address is not None:
        dist.init_process_group(
            "gloo", init_method=address, rank=layout.rank, world_size=layout.size, timeout=_NO_TIMEOUT
        )


def device_of_rank(layout: RankLayout) -> torch.device:
    """Return the GPU of a rank: the one with the index of the rank on its host, or the only visible one.

    Raises `UnsupportedOption` if several ranks of a host would share a GPU.
    """
    local = next((int(os.environ[name]) for name in _LOCAL_RANKS if name in os.environ), layout.rank)
    count = torch.cuda.device_count()
    if count == 1 and "CUDA_VISIBLE_DEVICES" in os.environ:
        local = 0
    if local >= count:
        raise UnsupportedOption(f"rank {layout.rank} needs a GPU of its own, but this host has {count}")
    torch.cuda.set_device(local)
    return torch.device("cuda", local)


def _stages_of(layout: RankLayout) -> list[list[int]]:
    """Return the ranks of each stage, from rank 0 on."""
    size = layout.tensor_parallel
    return [list(range(first, first + size)) for first in range(0, layout.size, size)]


def meeting_point(layout: RankLayout, communicator: Communicator) -> str:
    """Return the address at which torch.distributed connects the ranks; the same on all of them."""
    if "MASTER_ADDR" in os.environ and "MASTER_PORT" in os.environ:
        return "env://"
    # The address as bytes, in the floats that ranks exchange.
    message = np.zeros(_MAX_ADDRESS, np.float32)
    if layout.rank:
        communicator.receive(message, 0)
        return bytes(message[message > 0].astype(np.uint8)).decode()
    with socket.socket() as probe:
        probe.bind(("", 0))
        address = f"tcp://{_own_address()}:{probe.getsockname()[1]}"
    message[: len(address)] = list(address.encode())
    for rank in range(1, layout.size):
        communicator.send(message, rank)
    return address


def _own_address() -> str:
    """Return an address of this host that the other ranks can reach, or the loopback address without a network."""
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return "127.0.0.1"

"""Rank of this process, as told by the launcher that started it: mpirun, srun, torchrun or a LeaderWorkerSet."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

LEADER_PORT = 29400
"""Default port of rank 0 in a LeaderWorkerSet."""
_FIRST_PORT, _NUM_PORTS = 20000, 10000


class LaunchedRank(NamedTuple):
    """One of `size` processes that a launcher has started.

    `address`: where rank 0 listens for the others: a path if all ranks are on this host, else HOST:PORT; None if the
    launcher does not determine it.
    """

    rank: int
    size: int
    launcher: str
    address: str | None = None


def launched_rank(environment: Mapping[str, str] = os.environ) -> LaunchedRank | None:
    """Return the rank that a launcher gave to this process; None if there is no launcher.

    In the batch script of a Slurm job there is no rank: only `srun` starts ranks.
    """
    numbers = {name: int(value) for name, value in environment.items() if value.isdecimal()}

    def pair(rank: str, size: str) -> tuple[int, int] | None:
        if rank in numbers and numbers.get(size, 0) > numbers[rank]:
            return numbers[rank], numbers[size]
        return None

    # torchrun may itself have been started by srun; the names of its variables are too common to mean anything alone.
    if "TORCHELASTIC_RUN_ID" in environment and (found := pair("RANK", "WORLD_SIZE")):
        if numbers.get("LOCAL_WORLD_SIZE") == found[1]:
            return LaunchedRank(*found, "torchrun", _local_address(os.getppid()))
        # The port itself belongs to torchrun's store.
        host, port = (
            environment.get("MASTER_ADDR", "127.0.0.1"),
            numbers.get("MASTER_PORT", LEADER_PORT - 1) + 1,
        )
        return LaunchedRank(*found, "torchrun", f"{host}:{port}")
    if "SLURM_STEP_ID" in numbers and (found := pair("SLURM_PROCID", "SLURM_STEP_NUM_TASKS")):
        local = numbers.get("SLURM_STEP_NUM_NODES") == 1
        address = _local_address(os.getppid()) if local else _slurm_address(environment, numbers)
        return LaunchedRank(*found, "srun", address)
    for launcher, rank, size, local_size in (
        ("mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"),
        ("mpiexec", "PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS"),
        ("mpirun", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_SIZE"),
    ):
        if found := pair(rank, size):
            local = numbers.get(local_size) == found[1]
            return LaunchedRank(*found, launcher, _local_address(os.getppid()) if local else None)
    if found := pair("LWS_WORKER_INDEX", "LWS_GROUP_SIZE"):
        leader = environment.get("LWS_LEADER_ADDRESS")
        return LaunchedRank(*found, "LeaderWorkerSet", f"{leader}:{LEADER_PORT}" if leader else None)
    return None


def _local_address(launcher: int) -> str:
    """Return the path of a Unix socket of this user. Ranks of one launcher have the same parent process."""
    return str(Path(tempfile.gettempdir()).absolute() / f"neso-{os.geteuid()}" / f"ranks-{launcher}")


def _slurm_address(environment: Mapping[str, str], numbers: Mapping[str, int]) -> str | None:
    """Return the address of the first host of a job step, where Slurm starts rank 0."""
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST")
    if not nodes:
        return None
    port = _FIRST_PORT + (numbers.get("SLURM_JOB_ID", 0) * 31 + numbers["SLURM_STEP_ID"]) % _NUM_PORTS
    return f"{first_host(nodes)}:{port}"


def first_host(nodes: str) -> str:
    """Return the first host of a list of hosts in Slurm's notation: `gpu[07-09,12],cpu1` is `gpu07`."""
    first = re.match(r"[^,\[]*(?:\[[^\]]*\][^,\[]*)*", nodes)
    assert first is not None
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", first[0])

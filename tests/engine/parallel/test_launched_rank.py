"""Rank of a process in the environments of launchers."""

from __future__ import annotations

import os
import tempfile

import pytest

from neso.engine.parallel.launched_rank import LaunchedRank, first_host, launched_rank

LOCAL = f"{tempfile.gettempdir()}/neso-{os.geteuid()}/ranks-{os.getppid()}"
TORCH = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "host", "MASTER_PORT": "29500"}
SLURM = {
    "SLURM_PROCID": "3",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_NODELIST": "n[01-02]",
}


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, None),
        (
            {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_SIZE": "4"},
            LaunchedRank(1, 4, "mpirun", LOCAL),
        ),
        (
            {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"},
            LaunchedRank(1, 4, "mpirun"),
        ),
        ({"PMI_RANK": "0", "PMI_SIZE": "2", "MPI_LOCALNRANKS": "2"}, LaunchedRank(0, 2, "mpiexec", LOCAL)),
        ({**SLURM, "SLURM_STEP_ID": "1"}, LaunchedRank(3, 4, "srun", "n01:20218")),
        ({**SLURM, "SLURM_NTASKS": "4"}, None),
        ({**SLURM, "SLURM_STEP_ID": "1", "PMI_RANK": "3", "PMI_SIZE": "4"}, LaunchedRank(3, 4, "srun", "n01:20218")),
        (
            {**TORCH, "TORCHELASTIC_RUN_ID": "none"},
            LaunchedRank(1, 2, "torchrun", "host:29501"),
        ),
        (
            {**TORCH, "TORCHELASTIC_RUN_ID": "none", "LOCAL_WORLD_SIZE": "2"},
            LaunchedRank(1, 2, "torchrun", LOCAL),
        ),
        ({**SLURM, "SLURM_STEP_ID": "1", "SLURM_STEP_NUM_NODES": "1"}, LaunchedRank(3, 4, "srun", LOCAL)),
        (TORCH, None),
        (
            {"LWS_WORKER_INDEX": "1", "LWS_GROUP_SIZE": "2", "LWS_LEADER_ADDRESS": "neso-0.neso.ns"},
            LaunchedRank(1, 2, "LeaderWorkerSet", "neso-0.neso.ns:29400"),
        ),
        ({"PMI_RANK": "2", "PMI_SIZE": "2"}, None),
        ({"PMI_RANK": "x", "PMI_SIZE": "2"}, None),
    ],
)  # fmt: skip
def test_environments(environment, expected):
    assert launched_rank(environment) == expected


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("localhost", "localhost"),
        ("a,b", "a"),
        ("gpu[07-09,12],cpu1", "gpu07"),
        ("rack[1-2]-node[3,5]", "rack1-node3"),
        ("n[3]", "n3"),
    ],
)
def test_first_host_of_a_list(nodes, first):
    assert first_host(nodes) == first

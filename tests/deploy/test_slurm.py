"""deploy/slurm/neso.sbatch on a real Slurm cluster of two nodes on this machine."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from eventually import wait_until
from free_port import free_ports

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "engine")]
from require_mpi import requires_mpi  # noqa: E402
from slurm_cluster import SlurmCluster, missing  # noqa: E402

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(420),
    pytest.mark.skipif(bool(missing()), reason=missing() or "-"),
    requires_mpi,
]

SCRIPT = Path(__file__).parents[2] / "deploy" / "slurm" / "neso.sbatch"
MODEL = "neso-pilot"
BODY = {"text_input": "What is TTFT?", "max_tokens": 8, "temperature": 0}


@pytest.fixture(scope="module")
def cluster() -> Iterator[SlurmCluster]:
    with SlurmCluster() as cluster:
        yield cluster


class Job:
    """A server in a job of two nodes with one rank each."""

    def __init__(self, cluster: SlurmCluster, folder: Path) -> None:
        self.cluster, self.ports = cluster, free_ports(5)
        self.log = folder / "log"
        flags = [
            f"--{name}-port={port}"
            for name, port in zip(("http", "grpc", "metrics", "openai"), self.ports, strict=False)
        ]
        export = f"ALL,NESO={sys.executable} -m neso.cli,NESO_RANK_ADDRESS=127.0.0.1:{self.ports[4]}"
        options = [
            "--nodes=2",
            "--ntasks-per-node=1",
            f"--output={self.log}",
            f"--export={export}",
        ]
        self.number = int(
            cluster.call(
                "sbatch",
                "--parsable",
                *options,
                str(SCRIPT),
                *flags,
                "--exit-timeout-secs=5",
                MODEL,
                cwd=folder,
            )
        )

    def answer(self) -> str | None:
        """Return the reply of the model; None if the server is not ready."""
        try:
            response = httpx.post(
                f"http://127.0.0.1:{self.ports[0]}/v2/models/{MODEL}/generate", json=BODY, timeout=30
            )
        except httpx.TransportError:
            return None
        return str(response.json()["text_output"]) if response.status_code == 200 else None

    def wait_until_ready(self, restarts: int = 0) -> None:
        def ready() -> bool:
            state = self.cluster.state(self.number)
            assert state in ("PENDING", "CONFIGURING", "RUNNING"), f"{state}\n{self.text}"
            return self.text.count("Neso is ready") > restarts and self.answer() is not None

        try:
            wait_until(ready, 180)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.text}\n{self.cluster.logs()}") from None

    @property
    def text(self) -> str:
        return self.log.read_text() if self.log.exists() else ""

    def steps(self) -> list[str]:
        return re.findall(r"rank \d of 2", self.text)


def test_two_nodes_serve_one_model_and_stop(cluster: SlurmCluster, tmp_path: Path) -> None:
    job = Job(cluster, tmp_path)
    job.wait_until_ready()
    assert job.answer() == " TTFT is the time to first token:"
    # On a busy machine Slurm 22.05 sometimes misreads long values of PMI-2; the script then starts the ranks again.
    assert set(job.steps()) == {"rank 0 of 2", "rank 1 of 2"}
    cluster.call("scancel", "--batch", "--signal=TERM", str(job.number))
    wait_until(lambda: cluster.state(job.number) not in ("RUNNING", "COMPLETING"))
    assert "stopping" in job.text
    assert cluster.state(job.number) in ("COMPLETED", "FAILED", "CANCELLED")


def test_ranks_start_again_when_one_has_ended(cluster: SlurmCluster, tmp_path: Path) -> None:
    job = Job(cluster, tmp_path)
    job.wait_until_ready()
    pid = re.findall(r"(\d+) leader_mode.*rank 1 of 2", job.text)[-1]
    os.kill(int(pid), signal.SIGKILL)
    job.wait_until_ready(restarts=1)
    cluster.call("scancel", str(job.number))

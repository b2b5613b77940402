"""Ranks of a model on a real server that die or hang under load: errors, restart, other models, leftovers."""

from __future__ import annotations

import json
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "conformance"))
sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))

from eventually import wait_until
from in_flight import QUESTION, InFlight, answer, live, ready
from require_mpi import requires_mpi
from server_process import ServerProcess
from step_pace import slow_environment

from neso.models import SHIPPED_MODELS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300), requires_mpi]

OTHER = "single"
_LAUNCHERS = ("mpiexec", "hydra_pmi_proxy", "prterun", "orterun", "mpirun")


def ranks_of(server: ServerProcess) -> dict[int, psutil.Process]:
    """Return the rank processes by rank."""
    found = {}
    for child in psutil.Process(server.process.pid).children(recursive=True):
        try:
            if "neso.engine.parallel.rank_process" in child.cmdline() and child.name() not in _LAUNCHERS:
                environment = child.environ()
                rank = environment.get("PMI_RANK") or environment.get("OMPI_COMM_WORLD_RANK")
                if rank is not None:
                    found[int(rank)] = child
        except psutil.Error:
            continue
    return found


def supervisor_of(server: ServerProcess) -> psutil.Process:
    children = psutil.Process(server.process.pid).children(recursive=True)
    return next(child for child in children if "neso.engine.parallel.supervisor" in child.cmdline())


def segments_of(ranks: dict[int, psutil.Process]) -> set[Path]:
    """Return the files in shared memory that the ranks have mapped."""
    paths = {Path(mapped.path) for rank in ranks.values() for mapped in rank.memory_maps()}
    return {path for path in paths if path.is_relative_to("/dev/shm")}


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[ServerProcess]:
    """A model of two ranks and a model of one. Steps take 50 ms, so that requests are in flight when a rank ends."""
    model = tmp_path_factory.mktemp("repository") / OTHER
    (model / "1").mkdir(parents=True)
    (model / "config.pbtxt").write_text('backend: "llm"')
    (model / "1" / "model.json").write_text(json.dumps({"model": str(SHIPPED_MODELS["neso-pilot"])}))
    with ServerProcess(
        "neso-pilot",
        f"--model-repository={model.parent}",
        "--tensor-parallel-size=2",
        "--engine-config=heartbeat_timeout=6",
        "--engine-config=max_restarts=50",
        environment=slow_environment(tmp_path_factory.mktemp("slow")),
        timeout=180,
    ) as process:
        assert process.ports, process.output
        yield process


class OtherModel:
    """Sends requests to the model of one rank until `stop`, which returns the number of answers."""

    def __init__(self, server: ServerProcess) -> None:
        self._server = server
        self._answers, self._failures = 0, []
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> int:
        self._stopped.set()
        self._thread.join(60)
        assert not self._thread.is_alive() and not self._failures, self._failures
        return self._answers

    def _run(self) -> None:
        request = {"text_input": QUESTION, "max_tokens": 4, "temperature": 0}
        while not self._stopped.is_set():
            status, body = self._server.post(f"/v2/models/{OTHER}/generate", request)
            if status == 200:
                self._answers += 1
            else:
                self._failures.append(body)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("rank", [0, 1])
def test_model_is_loaded_again_after_a_rank_fails(server, rank, number):
    wait_until(lambda: ready(server) and len(ranks_of(server)) == 2)
    expected, before = answer(server), ranks_of(server)
    segments = segments_of(before)
    assert segments
    other = OtherModel(server)
    in_flight = InFlight(server)
    started = time.monotonic()
    before[rank].send_signal(number)
    errors = in_flight.join()
    detected = time.monotonic() - started
    assert set(errors) == {"generate", "generate_stream", "grpc", "openai", "openai stream"}
    for protocol, error in errors.items():
        assert f"rank {rank} (process {before[rank].pid}" in error and "retry" in error, (
            f"{protocol}: {error}"
        )
    wait_until(lambda: ready(server), 60)
    print(f"rank {rank}, {number.name}: detected {detected:.2f} s, ready {time.monotonic() - started:.2f} s")
    assert answer(server) == expected
    assert other.stop() > 0
    assert not any(process.is_running() for process in before.values())
    assert not {process.pid for process in ranks_of(server).values()} & {p.pid for p in before.values()}
    assert not any(path.exists() for path in segments)
    assert live(server)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_ranks_end_with_their_supervisor(server, number):
    wait_until(lambda: ready(server) and len(ranks_of(server)) == 2)
    before = ranks_of(server)
    supervisor_of(server).send_signal(number)
    wait_until(lambda: not any(process.is_running() for process in before.values()), 30)
    wait_until(lambda: ready(server), 60)
    assert answer(server)


def test_nothing_is_left_after_the_server_ends():
    with ServerProcess("neso-pilot", "--tensor-parallel-size=2", timeout=180) as server:
        assert server.ports, server.output
        children = psutil.Process(server.process.pid).children(recursive=True)
        segments = segments_of(ranks_of(server))
        assert segments
        assert server.stop() == 0, server.output
    wait_until(lambda: not any(child.is_running() for child in children))
    assert not any(path.exists() for path in segments)


def test_nothing_is_left_after_the_server_is_killed():
    with ServerProcess("neso-pilot", "--tensor-parallel-size=2", timeout=180) as server:
        assert server.ports, server.output
        ranks = ranks_of(server)
        children = psutil.Process(server.process.pid).children(recursive=True)
        ranks[1].suspend()
        server.process.kill()
        wait_until(lambda: not any(child.is_running() for child in children), 30)

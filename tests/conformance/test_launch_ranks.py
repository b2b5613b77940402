"""TensorRT-LLM's walkthrough for several GPUs, on ranks of this machine: leader mode and orchestrator mode."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import orjson
import psutil
import pytest
from eventually import wait_until
from free_port import free_ports
from layout_repository import ANSWER, PROMPT, init

sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))
from require_mpi import requires_mpi

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300), requires_mpi]

SCRIPT = Path(__file__).parents[2] / "scripts" / "launch_triton_server.py"


class Launched:
    """The processes of one call of the script."""

    def __init__(self, log: Path, ports: list[int], marker: str) -> None:
        self.log, self.ports, self._marker = log, ports, marker

    @property
    def servers(self) -> list[psutil.Process]:
        """Processes of `neso serve`; with several ranks, in the order of ranks."""
        found = []
        for process in psutil.process_iter():
            try:
                words = process.cmdline()
                if self._marker in words and "serve" in words and "mpiexec" not in Path(words[0]).name:
                    found.append((int(process.environ().get("PMI_RANK", 0)), process))
            except psutil.Error:
                continue
        return [process for _, process in sorted(found, key=lambda entry: entry[0])]

    def post(self, path: str, body: object) -> dict[str, object]:
        request = urllib.request.Request(f"http://127.0.0.1:{self.ports[0]}{path}", orjson.dumps(body))
        with urllib.request.urlopen(request, timeout=60) as response:
            reply: dict[str, object] = orjson.loads(response.read())
        return reply

    def ready(self) -> bool:
        try:
            with urllib.request.urlopen(
                f"http://127.0.0.1:{self.ports[0]}/v2/health/ready", timeout=10
            ) as response:
                return bool(response.status == 200)
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            assert self.servers, self.log.read_text()
            return False


def listening(process: psutil.Process) -> set[int]:
    """Return the ports on which a process listens."""
    return {entry.laddr.port for entry in process.net_connections() if entry.status == psutil.CONN_LISTEN}


@contextmanager
def launched(tmp_path: Path, repository: Path, *options: str, cpus: str = "") -> Iterator[Launched]:
    """Run the script, on these CPUs, and wait until its server is ready."""
    ports = free_ports(4)
    log = tmp_path / f"log-{ports[0]}"
    flags = [
        f"--{name}_port={port}" for name, port in zip(("http", "grpc", "metrics"), ports[:3], strict=True)
    ]
    with log.open("wb") as output:
        command = ["taskset", "-c", cpus] if cpus else []
        command += [sys.executable, str(SCRIPT), f"--model_repo={repository}", "--force", *flags, *options]
        subprocess.run(
            [*command, "--", f"--openai-port={ports[3]}"],
            stdout=output, stderr=output, stdin=subprocess.DEVNULL, check=True, timeout=60,
        )  # fmt: skip
    server = Launched(log, ports, f"--http-port={ports[0]}")
    try:
        wait_until(lambda: server.servers)
        wait_until(server.ready, 200)
        yield server
    finally:
        processes = server.servers
        for process in processes:
            process.send_signal(signal.SIGTERM)
        _, alive = psutil.wait_procs(processes, 60)
        for process in alive:
            process.kill()


def test_leader_mode(tmp_path: Path) -> None:
    repository = init(tmp_path / "triton_model_repo")
    with launched(tmp_path, repository, "--world_size=2") as server:
        assert len(server.servers) == 2
        body = {"text_input": PROMPT, "max_tokens": 12, "bad_words": "", "stop_words": ""}
        for model in ("ensemble", "tensorrt_llm_bls"):
            assert server.post(f"/v2/models/{model}/generate", body)["text_output"] == PROMPT + ANSWER
        leader, follower = server.servers
        assert listening(leader) >= set(server.ports) and not listening(follower) & set(server.ports)
        follower.kill()
        wait_until(lambda: not server.servers)


def test_two_instances_in_leader_mode(tmp_path: Path) -> None:
    """TensorRT-LLM's guide for two instances of LLaMA: two calls of the script with CPUs of their own."""
    repository = init(tmp_path / "llama_ifb")
    cpus = sorted(os.sched_getaffinity(0))
    halves = [cpus[: len(cpus) // 2] or cpus, cpus[len(cpus) // 2 :]]
    first_cpus, second_cpus = (",".join(map(str, half)) for half in halves)
    body = {"text_input": PROMPT, "max_tokens": 12, "bad_words": "", "stop_words": ""}
    with (
        launched(tmp_path, repository, "--world_size=2", cpus=first_cpus) as first,
        launched(tmp_path, repository, "--world_size=2", cpus=second_cpus) as second,
    ):
        for server, half in zip((first, second), halves, strict=True):
            assert server.post("/v2/models/ensemble/generate", body)["text_output"] == PROMPT + ANSWER
            assert [set(process.cpu_affinity()) <= set(half) for process in server.servers] == [True, True]
        first.servers[1].kill()
        wait_until(lambda: not first.servers)
        assert second.post("/v2/models/ensemble/generate", body)["text_output"] == PROMPT + ANSWER


def test_orchestrator_mode(tmp_path: Path) -> None:
    whole = init(tmp_path / "whole")
    repository = tmp_path / "triton_model_repo"
    for name, devices in (("tensorrt_llm", "0,1"), ("tensorrt_llm_2", "2,3")):
        (repository / name / "1").mkdir(parents=True)
        config = (whole / "tensorrt_llm" / "config.pbtxt").read_text()
        config = config.replace('name: "tensorrt_llm"', f'name: "{name}"')
        for key, value in (("gpu_device_ids", devices), ("tensor_parallel_size", "2")):
            config += f'\nparameters {{ key: "{key}" value {{ string_value: "{value}" }} }}'
        (repository / name / "config.pbtxt").write_text(config)
    with launched(tmp_path, repository, "--multi-model") as server:
        body = {"input_ids": [5, 6, 7], "input_lengths": 3, "request_output_len": 6}
        names = ("tensorrt_llm", "tensorrt_llm_2")
        first, second = (server.post(f"/v2/models/{name}/generate", body)["output_ids"] for name in names)
        assert first == second
        children = server.servers[0].children(recursive=True)
        ranks = [
            child
            for child in children
            if "neso.engine.parallel.rank_process" in child.cmdline() and child.name().startswith("python")
        ]
        assert len(ranks) == 4
        if len(os.sched_getaffinity(0)) >= 4:
            bound = [set(rank.cpu_affinity()) for rank in ranks]
            assert sum(map(len, bound)) == len(set.union(*bound)), "ranks have their own CPUs"

"""`--server-processes 2` when a process ends: engines and front-end processes are replaced, and nothing leaks."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from eventually import wait_until
from server_process import ServerProcess
from step_pace import slow_environment
from test_server_processes import (
    MODEL,
    STREAM,
    Connections,
    find_front_end,
    front_end,
    listening_ports,
    request,
)
from test_several_engines import engines

pytestmark = pytest.mark.slow

GENERATE = f"/v2/models/{MODEL}/generate"
SHORT = {"text_input": "def", "parameters": {"max_tokens": 4, "temperature": 0}}
KEYS = "alice:sk-alice\n"


@pytest.fixture(scope="module", params=[1, 2], ids=lambda number: f"{number} engines")
def server(request, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("server")
    arguments = (MODEL, "--server-processes=2", f"--data-parallel-size={request.param}")
    with ServerProcess(*arguments, environment=slow_environment(folder, 0.005)) as process:
        assert process.ports, process.output
        yield process


def statuses(server: ServerProcess) -> set[int]:
    """Return the statuses of short requests at both processes."""
    opened = Connections(server)
    with ThreadPoolExecutor(len(opened.all)) as pool:
        found = set(pool.map(lambda each: request(each, "POST", GENERATE, SHORT)[0], opened.all))
    opened.close()
    return found


def descriptors(server: ServerProcess) -> list[int]:
    """Return the numbers of open files of the main process and the engines."""
    return [process.num_fds() for process in (psutil.Process(server.process.pid), *engines(server))]


def is_replaced(server: ServerProcess, killed: psutil.Process) -> bool:
    """Return whether another front-end process listens on all ports but that of the metrics."""
    process = find_front_end(server)
    if process is None or process.pid == killed.pid:
        return False
    return listening_ports(process) >= {
        port for protocol, port in server.ports.items() if protocol != "metrics"
    }


def test_engines_serve_both_processes(server):
    before = server.gauge("vllm:generation_tokens_total")
    assert statuses(server) == {200}
    assert server.gauge("vllm:generation_tokens_total") == before + 4 * 32
    per_engine = [
        value for name, value in server.metrics().items() if name.startswith("neso_engine_steps_total{")
    ]
    assert len(per_engine) == len(engines(server)) and all(per_engine)


def test_killed_engine_serves_both_processes_again(server):
    number = len(engines(server))
    opened = Connections(server)
    body = {**STREAM, "max_tokens": 400}

    def stream(connection) -> bool:
        """Return whether the stream was complete."""
        status, reply = request(connection, "POST", "/v1/completions", body)
        assert status in (200, 503)
        complete = b"data: [DONE]\n" in reply and b'"error"' not in reply
        assert complete or b"is being restarted" in reply
        return complete

    with ThreadPoolExecutor(len(opened.all)) as pool:
        results = [pool.submit(stream, connection) for connection in opened.all]
        wait_until(lambda: server.gauge("vllm:num_requests_running") == len(opened.all))
        engines(server)[0].kill()
        complete = [result.result(60) for result in results]
    assert not all(complete)
    assert any(complete) == (number == 2)
    opened.close()
    wait_until(lambda: server.gauge("neso_process_restarts_total") >= 1)
    wait_until(lambda: server.get("/v2/health/ready")[0] == 200 and len(engines(server)) == number)
    wait_until(lambda: statuses(server) == {200})
    assert statuses(server) == {200}
    wait_until(lambda: server.gauge("vllm:num_requests_running") == 0)


def test_killed_front_ends_leave_nothing_open(server):
    assert statuses(server) == {200}
    before = descriptors(server)
    for _ in range(3):
        killed = front_end(server)
        killed.kill()
        wait_until(lambda killed=killed: is_replaced(server, killed))
        assert statuses(server) == {200}
    wait_until(lambda: descriptors(server) == before)


def test_reloaded_keys_reach_both_processes(tmp_path: Path):
    file = tmp_path / "keys"
    file.write_text(KEYS)
    times = file.stat()
    body = {"model": MODEL, "prompt": "def", "max_tokens": 1}
    with ServerProcess(MODEL, "--server-processes=2", f"--api-key-file={file}") as server:
        opened = Connections(server, "openai")

        def answers(key: str) -> set[int]:
            return {
                request(connection, "POST", "/v1/completions", body, **{"x-api-key": key})[0]
                for connection in opened.all
            }

        assert answers("sk-alice") == {200} and answers("sk-carol") == {401}
        file.write_text(KEYS.replace("alice", "carol"))
        # The file looks unchanged, so only the signal can make a process read it.
        os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
        assert answers("sk-alice") == {200} and answers("sk-carol") == {401}
        server.process.send_signal(signal.SIGHUP)
        wait_until(lambda: answers("sk-carol") == {200})
        assert answers("sk-alice") == {401}
        killed = front_end(server)
        opened.close()
        killed.kill()
        wait_until(lambda: is_replaced(server, killed))
        opened = Connections(server, "openai")
        assert answers("sk-carol") == {200} and answers("sk-alice") == {401}
        opened.close()

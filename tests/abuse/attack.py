"""A real `neso serve` process under attack: response time of a liveness probe, and memory.

    with AttackedServer(repository=tmp_path) as server:
        report = server.attack(lambda: send_flood(server.ports["grpc"]))
        report.check(limit_mib=64)

`attack` measures an idle baseline first, then runs the function in the calling thread. One thread of the test process
requests `GET /v2/health/live` every 20 ms on a connection of its own, another samples the memory of the server's
processes. The server must still answer at the end.
"""

from __future__ import annotations

import http.client
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
from server_process import ServerProcess

INTERVAL = 0.02  # seconds between two probes, and between two samples of memory
BASELINE = 1.0  # seconds of probes before the attack
PROBE_TIMEOUT = 60.0
# The aim is 100 ms. The tests share a machine, and an attack uses a core in the test process, so the bound is larger;
# the defects that these tests protect from held the event loop for seconds.
PROBE_BOUND = 0.5
MEMORY_BOUND = 100 << 20
MIB = 1 << 20


@dataclass(frozen=True)
class Report:
    """Times in seconds, sizes in bytes.

    `baseline`: longest probe before the attack. `lag`: longest delay of a timer in the test process during the attack,
    a measure of the load of the machine. `failed`: probes without a response.
    """

    name: str
    baseline: float
    longest: float
    lag: float
    probes: int
    failed: int
    memory_before: int
    memory_peak: int
    seconds: float

    @property
    def memory_growth(self) -> int:
        return self.memory_peak - self.memory_before

    @property
    def probe_bound(self) -> float:
        """Allowed time of a probe: a fixed part, and what this machine's load explains."""
        return PROBE_BOUND + 4 * self.baseline + 2 * self.lag

    def __str__(self) -> str:
        return (
            f"{self.name}: {self.seconds:.1f} s, longest probe {self.longest * 1e3:.0f} ms "
            f"(before {self.baseline * 1e3:.0f} ms, timer lag {self.lag * 1e3:.0f} ms, bound "
            f"{self.probe_bound * 1e3:.0f} ms, {self.failed} of {self.probes} failed), memory "
            f"{self.memory_before / MIB:.0f} + {self.memory_growth / MIB:.0f} MiB"
        )

    def check(self, limit_mib: float = 0) -> None:
        """Assert that probes were answered in time, and that memory grew by at most 100 MiB beyond a stated limit."""
        assert self.failed == 0, str(self)
        assert self.longest < self.probe_bound, str(self)
        assert self.memory_growth < limit_mib * MIB + MEMORY_BOUND, str(self)


class AttackedServer(ServerProcess):
    """`neso serve` with a model repository. `flags`: further flags, for example `--max-connections=50`."""

    def __init__(self, *flags: str, repository: Path, timeout: float = 90.0) -> None:
        super().__init__(f"--model-repository={repository}", *flags, timeout=timeout)
        assert self.ports, self.output

    def attack(self, run: Callable[[], object], name: str = "", settle: float = 0.5) -> Report:
        """Run an attack and measure. Probes go on for `settle` seconds after it returns. Prints the report."""
        label = name or getattr(run, "__name__", "attack")
        before = _Watch(self)
        with before.running():
            time.sleep(BASELINE)
        during = _Watch(self)
        started = time.monotonic()
        with during.running():
            run()
            seconds = time.monotonic() - started
            time.sleep(settle)
        assert self.process.poll() is None, f"the server has exited:\n{self.output[-2000:]}"
        report = Report(
            label,
            before.longest,
            during.longest,
            max(before.lag, during.lag),
            during.probes,
            before.failed + during.failed,
            before.memory,
            during.memory,
            seconds,
        )
        print(report)
        return report


class _Watch:
    """Probes liveness and samples memory until it is stopped."""

    def __init__(self, server: AttackedServer) -> None:
        self._server = server
        self._stop = threading.Event()
        self.longest = self.lag = 0.0
        self.probes = self.failed = 0
        self.memory = 0

    @contextmanager
    def running(self) -> Iterator[None]:
        threads = [threading.Thread(target=work, daemon=True) for work in (self._probe, self._sample)]
        interval = sys.getswitchinterval()
        sys.setswitchinterval(0.0005)  # the attack must not delay the thread that probes
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self._stop.set()
            for thread in threads:
                thread.join(PROBE_TIMEOUT + 5)
            sys.setswitchinterval(interval)

    def _probe(self) -> None:
        connection: http.client.HTTPConnection | None = None
        while not self._stop.is_set():
            started = time.monotonic()
            self.probes += 1
            try:
                if connection is None:
                    connection = http.client.HTTPConnection(
                        "127.0.0.1", self._server.ports["http"], timeout=PROBE_TIMEOUT
                    )
                connection.request("GET", "/v2/health/live")
                response = connection.getresponse()
                response.read()
                if response.status != 200:
                    self.failed += 1
            except (OSError, http.client.HTTPException):
                self.failed += 1
                connection = None
            self.longest = max(self.longest, time.monotonic() - started)
            self._stop.wait(INTERVAL)
        if connection is not None:
            connection.close()

    def _sample(self) -> None:
        process = psutil.Process(self._server.process.pid)
        while not self._stop.is_set():
            self.memory = max(self.memory, _resident(process))
            started = time.monotonic()
            time.sleep(INTERVAL)
            self.lag = max(self.lag, time.monotonic() - started - INTERVAL)


def _resident(process: psutil.Process) -> int:
    """Return the resident memory of a process and its children."""
    total = 0
    try:
        for each in (process, *process.children(recursive=True)):
            total += each.memory_info().rss
    except psutil.NoSuchProcess:
        pass
    return total


def write_python_model(repository: Path, name: str, config: str, code: str) -> None:
    """Create a Python model in a repository. `config`: text of config.pbtxt after the backend."""
    folder = repository / name
    (folder / "1").mkdir(parents=True)
    (folder / "config.pbtxt").write_text(f'backend: "python"\n{config}')
    (folder / "1" / "model.py").write_text(code)


def write_identity_model(repository: Path, name: str = "identity", datatype: str = "TYPE_FP32") -> None:
    """Create a Python model that returns its input `INPUT` as `OUTPUT`, of any length."""
    write_python_model(
        repository,
        name,
        f'input {{ name: "INPUT" data_type: {datatype} dims: [-1] }}\n'
        f'output {{ name: "OUTPUT" data_type: {datatype} dims: [-1] }}\n',
        """
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [
            pb_utils.InferenceResponse(
                [pb_utils.Tensor("OUTPUT", pb_utils.get_input_tensor_by_name(request, "INPUT").as_numpy())]
            )
            for request in requests
        ]
""",
    )

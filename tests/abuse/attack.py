"""A real `neso serve` process under attack: response time of a liveness probe, and memory.

    with AttackedServer(repository=tmp_path) as server:
        report = server.attack(lambda: send_flood(server.ports["grpc"]))
        report.check(limit_mib=64)

`attack` measures an idle baseline first, then runs the function in the calling thread. A process (`probe.py`) requests
`GET /v2/health/live` every 20 ms, a thread samples the memory of the server's processes. The server must still answer
at the end. Tests that measure have the mark `alone`. The time that the server and the probe wait for a core is not
counted. An attack whose probe takes too long is repeated, because other machines of the same host can take the cores
for a moment.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
from server_process import ServerProcess

INTERVAL = 0.02  # seconds between two samples of memory
BASELINE = 1.0  # seconds of probes before the attack
PROBE_BOUND = 0.1
MEMORY_BOUND = 100 << 20
TRIES = 3
MIB = 1 << 20


@dataclass(frozen=True)
class Report:
    """Times in seconds, sizes in bytes.

    `baseline`: longest probe before the attack. `longest`: longest probe during the attack. Both without the time that
    the server and the probe waited for a core. `failed`: probes without a response.
    """

    name: str
    baseline: float
    longest: float
    probes: int
    failed: int
    memory_before: int
    memory_peak: int
    seconds: float

    @property
    def memory_growth(self) -> int:
        return self.memory_peak - self.memory_before

    @property
    def responsive(self) -> bool:
        """Whether the probes were answered in time."""
        return self.longest < PROBE_BOUND + self.baseline

    def __str__(self) -> str:
        return (
            f"{self.name}: {self.seconds:.1f} s, longest probe {self.longest * 1e3:.0f} ms (before the attack "
            f"{self.baseline * 1e3:.0f} ms, {self.failed} of {self.probes} failed), memory "
            f"{self.memory_before / MIB:.0f} + {self.memory_growth / MIB:.0f} MiB"
        )

    def check(self, limit_mib: float = 0) -> None:
        """Assert that probes were answered in time, and that memory grew by at most 100 MiB beyond a stated limit."""
        assert self.failed == 0, str(self)
        assert self.responsive, str(self)
        assert self.memory_growth < limit_mib * MIB + MEMORY_BOUND, str(self)


class AttackedServer(ServerProcess):
    """`neso serve` with a model repository. `flags`: further flags, for example `--max-connections=50`."""

    def __init__(self, *flags: str, repository: Path, timeout: float = 90.0) -> None:
        super().__init__(f"--model-repository={repository}", *flags, timeout=timeout)
        assert self.ports, self.output

    def attack(self, run: Callable[[], object], name: str = "", settle: float = 0.5) -> Report:
        """Run an attack and measure. Probes go on for `settle` seconds after it returns. Prints the report.

        Runs it again, at most `TRIES` times, while probes take too long. Memory is that of the first run.
        """
        label = name or getattr(run, "__name__", "attack")
        report = self._attack(run, label, settle)
        for _ in range(TRIES - 1):
            if report.responsive:
                break
            again = self._attack(run, label, settle)
            report = replace(report, baseline=again.baseline, longest=again.longest)
        return report

    def _attack(self, run: Callable[[], object], label: str, settle: float) -> Report:
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
            during.probes,
            before.failed + during.failed,
            before.memory,
            during.memory,
            seconds,
        )
        print(report)
        return report


class _Watch:
    """Probes liveness and samples memory while a block runs."""

    def __init__(self, server: AttackedServer) -> None:
        self._server = server
        self._stop = threading.Event()
        self.longest = 0.0
        self.probes = self.failed = 0
        self.memory = 0

    @contextmanager
    def running(self) -> Iterator[None]:
        target = str(self._server.ports["http"]), str(self._server.process.pid)
        command = [sys.executable, "-S", str(Path(__file__).with_name("probe.py")), *target]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as probe:
            assert probe.stdout is not None and probe.stdin is not None
            assert probe.stdout.readline() == "ready\n"
            sampler = threading.Thread(target=self._sample, daemon=True)
            sampler.start()
            try:
                yield
            finally:
                self._stop.set()
                sampler.join()
                probe.stdin.close()
                found = json.loads(probe.stdout.read())
        self.longest, self.probes, self.failed = found["longest"], found["probes"], found["failed"]

    def _sample(self) -> None:
        process = psutil.Process(self._server.process.pid)
        while not self._stop.is_set():
            self.memory = max(self.memory, _resident(process))
            time.sleep(INTERVAL)


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

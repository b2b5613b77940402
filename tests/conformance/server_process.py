"""A real `neso serve` process on free ports."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orjson

PORT_LINE = re.compile(r"^  (http|grpc|metrics|openai)\s+(\d+)", re.MULTILINE)
# Default ports of the frontends in tests.
PLACES = {
    f"--{name}-{what}": value
    for name in ("http", "grpc", "metrics", "openai")
    for what, value in (("port", "0"), ("address", "127.0.0.1"))
}


class ServerProcess:
    """The constructor starts the server and returns when it is ready or has exited.

    `python`: the interpreter, by default that of this process. `environment`: additional variables.
    NESO_TEST_SERVER_PROCESSES=2 in the environment of the tests starts each server with `--server-processes=2`.
    """

    def __init__(
        self,
        *arguments: str | Path,
        cwd: Path | None = None,
        timeout: float = 90.0,
        python: str | Path = sys.executable,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        given = {str(argument).split("=")[0] for argument in arguments}
        places = [f"{flag}={value}" for flag, value in PLACES.items() if flag not in given]
        if (processes := os.environ.get("NESO_TEST_SERVER_PROCESSES")) and "--server-processes" not in given:
            places.append(f"--server-processes={processes}")
        command = [str(python), "-m", "neso.cli", "serve", *places, *map(str, arguments)]
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=cwd,
            env={**os.environ, **(environment or {})},
        )
        self.output = ""
        self._ready = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        started = time.perf_counter()
        self._reader.start()
        if not self._ready.wait(timeout):
            self.process.kill()
            raise TimeoutError(f"the server is neither ready nor gone after {timeout} s:\n{self.output}")
        self.seconds_to_ready = time.perf_counter() - started
        self.ports = {name: int(port) for name, port in PORT_LINE.findall(self.output)}

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.output += line
            if line.startswith("Neso is ready"):
                self._ready.set()
        self._ready.set()

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def stop(self) -> int:
        """Send SIGTERM and return the exit status; kill the process after 45 s."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(45)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._reader.join(20)
        return self.process.returncode

    def url(self, path: str = "", protocol: str = "http") -> str:
        return f"http://127.0.0.1:{self.ports[protocol]}{path}"

    def address(self, protocol: str) -> str:
        return f"127.0.0.1:{self.ports[protocol]}"

    def get(self, path: str, protocol: str = "http") -> tuple[int, bytes]:
        """Return status and body of a GET."""
        return _call(urllib.request.Request(self.url(path, protocol)))

    def post(self, path: str, body: Any, protocol: str = "http", **headers: str) -> tuple[int, Any]:
        """Return status and JSON body of a POST; bytes are sent unchanged, any other `body` as JSON."""
        data = body if isinstance(body, bytes) else orjson.dumps(body)
        request = urllib.request.Request(
            self.url(path, protocol), data, {"Content-Type": "application/json", **headers}
        )
        status, response = _call(request)
        return status, orjson.loads(response) if response else None

    def metrics(self) -> dict[str, float]:
        """Return all samples by name with labels."""
        status, text = self.get("/metrics", "metrics")
        assert status == 200
        lines = [line for line in text.decode().splitlines() if line and not line.startswith("#")]
        return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}

    def gauge(self, name: str) -> float:
        """Return the sum of a family over its labels."""
        return sum(value for key, value in self.metrics().items() if key.split("{")[0] == name)


def _call(request: urllib.request.Request) -> tuple[int, bytes]:
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.status, response.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()

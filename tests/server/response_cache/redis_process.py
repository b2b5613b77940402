"""A real Redis process."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest
from free_port import free_port

REDIS_SERVER = shutil.which("redis-server")
needs_redis = pytest.mark.skipif(REDIS_SERVER is None, reason="redis-server is not installed")


class RedisProcess:
    """`start` starts it, on the same port again after `stop`. It has no persistence."""

    def __init__(self, folder: Path, *arguments: str, tls: bool = False) -> None:
        self.port = free_port()
        self._folder = folder
        self._arguments = arguments
        self._tls = tls
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> RedisProcess:
        assert REDIS_SERVER is not None
        port = ("--port", "0", "--tls-port", str(self.port)) if self._tls else ("--port", str(self.port))
        command = [
            REDIS_SERVER,
            *port,
            "--bind",
            "127.0.0.1",
            "--save",
            "",
            "--dir",
            str(self._folder),
            *self._arguments,
        ]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        deadline = time.monotonic() + 60
        while not self._listens():
            if self._process.poll() is not None or time.monotonic() > deadline:
                output = self._process.stdout.read().decode() if self._process.stdout else ""
                raise RuntimeError(f"redis-server did not start:\n{output}")
            time.sleep(0.02)
        return self

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def suspend(self) -> None:
        """Accept connections without responding."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def __enter__(self) -> RedisProcess:
        return self.start()

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def _listens(self) -> bool:
        with socket.socket() as client:
            return client.connect_ex(("127.0.0.1", self.port)) == 0

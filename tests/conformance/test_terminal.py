"""`neso chat` and `neso models` with real servers, in a real terminal."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from eventually import wait_until
from server_process import ServerProcess

CHAT = [sys.executable, "-m", "neso.cli", "chat"]


class Terminal:
    """A program in a pseudo terminal."""

    def __init__(self, command: list[str], environment: dict[str, str]) -> None:
        master, slave = pty.openpty()
        self._process = subprocess.Popen(
            command,
            env={**os.environ, **environment},
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
        )
        os.close(slave)
        self._master = master

    def read_until(self, text: str, timeout: float = 60.0) -> str:
        """Return the output up to `text`."""
        output, end = b"", time.monotonic() + timeout
        while text.encode() not in output:
            assert time.monotonic() < end, output.decode()
            if select.select([self._master], [], [], 0.2)[0]:
                output += os.read(self._master, 4096)
        return output.decode()

    def write(self, line: str) -> None:
        os.write(self._master, f"{line}\n".encode())

    def interrupt(self) -> None:
        """Press Ctrl-C."""
        os.killpg(self._process.pid, signal.SIGINT)

    def end(self) -> int:
        """Press Ctrl-D and return the exit status."""
        os.write(self._master, b"\x04")
        return self._process.wait(timeout=30)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._master)


@pytest.fixture
def terminal(slow_server: ServerProcess, tmp_path: Path) -> Iterator[Terminal]:
    url = f"http://127.0.0.1:{slow_server.ports['openai']}"
    process = Terminal([*CHAT, url, "--temperature=0"], {"XDG_STATE_HOME": str(tmp_path)})
    yield process
    process.close()


@pytest.mark.slow
def test_conversation_with_a_stopped_answer(
    terminal: Terminal, slow_server: ServerProcess, tmp_path: Path
) -> None:
    terminal.read_until("/help lists the commands")
    terminal.write("What is TTFT?")
    assert "time to first token" in terminal.read_until("tokens/s")
    terminal.write("/set max_tokens 1000")
    terminal.write("/set ignore_eos true")
    terminal.write("What is paged attention?")
    terminal.read_until("Paged attention")
    terminal.interrupt()
    terminal.read_until("> ")
    wait_until(lambda: slow_server.gauge("vllm:num_requests_running") == 0)
    terminal.write("/show")
    assert "4 messages" in terminal.read_until("tools")
    assert terminal.end() == 0
    assert "What is TTFT?" in (tmp_path / "neso" / "chat_history").read_text()


@pytest.mark.slow
def test_chat_serves_a_model_itself() -> None:
    command = [*CHAT, "neso-pilot", "-p", "What is TTFT?", "--temperature=0", "--", "--max-model-len=256"]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.startswith("TTFT is the time to first token")


@pytest.mark.slow
def test_chat_reports_a_model_that_cannot_be_served() -> None:
    command = [*CHAT, "/no/such/model", "-p", "Hi"]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert answer.returncode == 1
    assert "there is no such directory" in answer.stderr


def test_served_models_are_listed(server: ServerProcess) -> None:
    url = f"http://127.0.0.1:{server.ports['http']}"
    command = [sys.executable, "-m", "neso.cli", "models", "--json", f"--url={url}"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert json.loads(printed)["served"][0]["name"] == "neso-pilot"

"""Follows a page of the documentation: writes its files, starts its servers, runs its examples."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from server_process import ServerProcess

DEFAULT_PORTS = {"http": 8000, "grpc": 8001, "metrics": 8002, "openai": 9000}
NESO = f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m neso.cli "$@"\n'
PYTHON = f'#!/bin/sh\nexec {shlex.quote(sys.executable)} "$@"\n'

_BLOCK = re.compile(
    r"(?:^`(?P<path>[^`\n]+)`:\n\n)?^```(?P<language>\w+)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL
)
_SECTION = re.compile(r"^## +(.+)$", re.MULTILINE)
_RUN = ("bash", "python")


@dataclass(frozen=True)
class Block:
    """A fenced block. After a line "`path`:" it is that file. `follows`: it comes directly after the previous block."""

    language: str
    text: str
    path: str | None
    follows: bool

    @property
    def is_answer(self) -> bool:
        """Return whether the block is the output of the previous one."""
        return self.follows and self.path is None and self.language in ("json", "text")

    def check(self, printed: str) -> None:
        """Raise `AssertionError` if the output differs."""
        if self.language == "json":
            assert json.loads(printed) == json.loads(self.text)
        else:
            assert printed.strip() == self.text.strip()


def blocks(text: str) -> list[Block]:
    """Return the blocks in order."""
    found, end = [], 0
    for match in _BLOCK.finditer(text):
        follows = not text[end : match.start()].strip()
        found.append(Block(match["language"], match["text"], match["path"], follows))
        end = match.end()
    return found


def sections(text: str) -> dict[str, str]:
    """Return the content of each second-level heading."""
    _, *parts = _SECTION.split(text)
    return dict(zip(parts[::2], parts[1::2], strict=True))


def at_addresses(code: str, server: ServerProcess) -> str:
    """Return the example with the server's ports instead of the default ones."""
    for name, port in DEFAULT_PORTS.items():
        code = code.replace(f"localhost:{port}", server.address(name))
    return code


class DocReader:
    """Follows a section in a separate folder.

    A block `neso serve …` starts a server for the following blocks and stops the previous one. Other Bash and Python
    blocks are run; a `json` or `text` block directly after one is its expected output. `stand_ins` replace names in
    commands and files by small local checkpoints.
    """

    def __init__(self, folder: Path, stand_ins: dict[str, str] | None = None) -> None:
        self._folder = folder
        self._stand_ins = stand_ins or {}
        self._server: ServerProcess | None = None
        commands = folder / ".commands"
        commands.mkdir()
        for name, script in (("neso", NESO), ("python", PYTHON)):
            (commands / name).write_text(script)
            (commands / name).chmod(0o755)
        self._environment = {**os.environ, "PATH": f"{commands}{os.pathsep}{os.environ['PATH']}"}

    def __enter__(self) -> DocReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._server is not None:
            self._server.stop()

    def follow(self, text: str) -> int:
        """Run the section; return the number of examples. Raises `AssertionError` if one fails."""
        printed, ran = None, 0
        for block in blocks(text):
            if block.path is not None:
                self._write(block)
                printed = None
            elif block.language in _RUN:
                printed = self._run(block)
                ran += 1
            elif block.is_answer and printed is not None:
                block.check(printed)
                printed = None
        return ran

    def _write(self, block: Block) -> None:
        path = self._folder / str(block.path)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(self._with_stand_ins(block.text))

    def _run(self, block: Block) -> str | None:
        """Return the output; None for a server."""
        code = self._with_stand_ins(block.text)
        if block.language == "bash" and code.startswith("neso serve"):
            self._serve(shlex.split(code.replace("\\\n", " "), comments=True)[2:])
            return None
        if self._server is not None:
            code = at_addresses(code, self._server)
        command = (
            [sys.executable, "-c", code]
            if block.language == "python"
            else ["bash", "-euo", "pipefail", "-c", code]
        )
        result = subprocess.run(
            command, capture_output=True, text=True, timeout=120, cwd=self._folder, env=self._environment
        )
        log = self._server.output if self._server is not None else ""
        assert result.returncode == 0, f"{code}\n{result.stdout}{result.stderr}{log}"
        assert '"error"' not in result.stdout, f"{code}\n{result.stdout}{log}"
        return result.stdout

    def _serve(self, arguments: list[str]) -> None:
        if self._server is not None:
            self._server.stop()
        self._server = ServerProcess(*arguments, cwd=self._folder)
        assert self._server.ports, self._server.output

    def _with_stand_ins(self, text: str) -> str:
        for name, stand_in in self._stand_ins.items():
            text = text.replace(name, stand_in)
        return text

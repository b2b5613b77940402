"""Records a session in the terminal as an asciinema cast, and draws its last screen as docs/images/terminal.svg.

Usage: `python scripts/record_terminal.py [CAST]`. The commands run for real, in a fresh clone of this checkout's last
commit, which is installed from a wheel in dist/ if there is one, and compiled otherwise. asciinema plays CAST, by
default terminal.cast. Needs `pip install rich` and free default ports.
"""

from __future__ import annotations

import io
import json
import os
import pty
import re
import select
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).resolve().parents[1]
IMAGE = ROOT / "docs" / "images" / "terminal.svg"
COLUMNS, ROWS = 110, 40
PROMPT = "\x1b[32m$\x1b[0m "
_TITLE = "Neso"
SERVE = "./neso-up &"
ACTIVATE = "source .venv/bin/activate"
STEPS = (
    "neso models",
    'neso chat -p "What is in-flight batching?" --temperature 0',
    'neso chat -p "What is the KV cache?" --temperature 0 --max-tokens 30',
)


class Recording:
    """Output with the time since the start, as in asciicast v2."""

    def __init__(self) -> None:
        self._started = time.monotonic()
        self.events: list[tuple[float, str, str]] = []

    def write(self, text: str) -> None:
        self.events.append((round(time.monotonic() - self._started, 3), "o", text))

    def command(self, text: str) -> None:
        """Write a prompt and a command, as it is typed."""
        self.write(PROMPT)
        for char in text:
            self.write(char)
            time.sleep(0.02)
        self.write("\r\n")

    def run(self, command: list[str], folder: Path, until: str | None = None) -> subprocess.Popen[bytes]:
        """Record a command in a pseudo terminal until it ends, or has written `until`."""
        master, slave = pty.openpty()
        size = {"COLUMNS": str(COLUMNS), "LINES": str(ROWS), "TERM": "xterm-256color"}
        process = subprocess.Popen(
            command,
            cwd=folder,
            env={**os.environ, **size},
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
        )
        os.close(slave)
        seen = ""
        while until is None or until not in seen:
            if select.select([master], [], [], 0.1)[0]:
                try:
                    text = os.read(master, 4096).decode(errors="replace")
                except OSError:  # the program has ended
                    break
                seen += text
                self.write(text)
            elif process.poll() is not None:
                break
        return process

    def screen(self) -> str:
        """Return the output as lines with ANSI colors, without lines of progress that were erased."""
        text = "".join(text for _, _, text in self.events).replace("\r\n", "\n")
        text = re.sub(r"[^\n]*\r\x1b\[K", "", text).replace("\r", "\n")
        return text.replace("\n\n\n", "\n\n")

    def save(self, path: Path) -> None:
        """Write an asciinema cast."""
        header = {"version": 2, "width": COLUMNS, "height": ROWS, "title": _TITLE}
        lines = [json.dumps(header), *(json.dumps(event) for event in self.events)]
        path.write_text("\n".join(lines) + "\n")


def record(clone: Path) -> Recording:
    """Record the installation, a server and its clients in `clone`."""
    recording = Recording()
    recording.command(SERVE)
    server = recording.run(["./neso-up"], clone, until="0}}'")
    if server.poll() is not None:
        raise SystemExit(f"the server has ended:\n{recording.screen()}")
    recording.write("\r\n")
    try:
        recording.command(ACTIVATE)
        for step in STEPS:
            recording.command(step)
            _, *arguments = shlex.split(step)
            recording.run([str(clone / ".venv" / "bin" / "neso"), *arguments], clone).wait()
            recording.write("\r\n")
    finally:
        server.terminate()
        server.wait()
    return recording


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        clone = Path(folder) / "neso"
        subprocess.run(["git", "clone", "-q", "--no-hardlinks", str(ROOT), str(clone)], check=True)
        if (ROOT / "dist").is_dir():  # copies are newer than the sources, as ./neso-up requires
            shutil.copytree(ROOT / "dist", clone / "dist", copy_function=shutil.copy)
        recording = record(clone)
    recording.save(Path(sys.argv[1] if len(sys.argv) > 1 else "terminal.cast"))
    console = Console(record=True, width=COLUMNS, file=io.StringIO())
    console.print(Text.from_ansi(recording.screen()))
    # Images in README files cannot load fonts from the network.
    IMAGE.write_text(re.sub(r"@font-face \{[^}]*\}", "", console.export_svg(title=_TITLE)))


if __name__ == "__main__":
    main()

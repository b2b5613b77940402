"""Records a session in the terminal as an asciinema cast, and draws its last screen as docs/images/terminal.svg.

Usage: `python scripts/record_terminal.py [CAST]`, in an environment with Neso. The commands run for real.
asciinema plays CAST, by default terminal.cast.
"""

from __future__ import annotations

import io
import json
import os
import pty
import re
import select
import shlex
import subprocess
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.text import Text

IMAGE = Path(__file__).parents[1] / "docs" / "images" / "terminal.svg"
COLUMNS, ROWS = 110, 40
PROMPT = "\x1b[32m$\x1b[0m "
_BIN = Path(sys.executable).parent
_TITLE = "Neso"
SERVE = "neso serve neso-pilot &"
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

    def run(self, command: list[str], until: str | None = None) -> subprocess.Popen[bytes]:
        """Record a command in a pseudo terminal until it ends, or has written `until`."""
        master, slave = pty.openpty()
        size = {"COLUMNS": str(COLUMNS), "LINES": str(ROWS), "TERM": "xterm-256color"}
        process = subprocess.Popen(
            command,
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
        """Return the output as lines with ANSI colors."""
        return re.sub(r"\r\n?", "\n", "".join(text for _, _, text in self.events)).replace("\n\n\n", "\n\n")

    def save(self, path: Path) -> None:
        """Write an asciinema cast."""
        header = {"version": 2, "width": COLUMNS, "height": ROWS, "title": _TITLE}
        lines = [json.dumps(header), *(json.dumps(event) for event in self.events)]
        path.write_text("\n".join(lines) + "\n")


def program(command: str) -> list[str]:
    """Return the arguments of a command of `neso` in this environment."""
    _, *arguments = shlex.split(command.removesuffix("&"))
    return [str(_BIN / "neso"), *arguments]


def main() -> None:
    recording = Recording()
    recording.command(SERVE)
    server = recording.run(program(SERVE), until="\r\n\r\n  curl")
    recording.write("\r\n")
    try:
        for step in STEPS:
            recording.command(step)
            recording.run(program(step)).wait()
            recording.write("\r\n")
    finally:
        server.terminate()
        server.wait()
    recording.save(Path(sys.argv[1] if len(sys.argv) > 1 else "terminal.cast"))
    console = Console(record=True, width=COLUMNS, file=io.StringIO())
    console.print(Text.from_ansi(recording.screen()))
    # Images in README files cannot load fonts from the network.
    IMAGE.write_text(re.sub(r"@font-face \{[^}]*\}", "", console.export_svg(title=_TITLE)))


if __name__ == "__main__":
    main()

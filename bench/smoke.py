"""Command line of the benchmark scripts, and `--smoke`: a run of a few seconds that tests only the script."""

from __future__ import annotations

import argparse
import importlib.util
import shutil
import signal
import sys
from pathlib import Path
from typing import Any, NoReturn

MISSING = 77
"""Exit status of a script whose requirements are not installed."""


def parse_arguments(parser: argparse.ArgumentParser, **smoke: Any) -> argparse.Namespace:
    """Parse the command line; with `--smoke`, these values replace those of the other arguments.

    From then on SIGTERM raises `SystemExit`, so that `with` blocks stop the servers that the script has started.
    """
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    parser.add_argument("--smoke", action="store_true", help="run for a few seconds to test the script")
    arguments = parser.parse_args()
    if arguments.smoke:
        vars(arguments).update(smoke)
    return arguments


def require_command(name: str, package: str) -> None:
    """Exit with `MISSING` if the command is not installed."""
    if shutil.which(name) is None:
        exit_missing(f"{name} is missing: apt-get install {package}")


def require_module(name: str) -> None:
    """Exit with `MISSING` if the Python package is not installed."""
    if importlib.util.find_spec(name) is None:
        exit_missing(f"{name} is missing: pip install {name}")


def require_environment(venv: Path, script: str) -> None:
    """Exit with `MISSING` if the virtual environment of another server does not exist."""
    if not (venv / "bin" / "python").exists():
        exit_missing(f"{venv} is missing: {script}")


def exit_missing(message: str) -> NoReturn:
    """Exit with `MISSING` and this message."""
    print(message, file=sys.stderr)
    raise SystemExit(MISSING)

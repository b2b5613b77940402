"""`EXECUTION_ENV_PATH`: the Python environment that a model's process runs in."""

from __future__ import annotations

import os
import sys
import tarfile
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path

from neso.server.errors import InvalidArgument

_MODEL_DIRECTORY = "$$TRITON_MODEL_DIRECTORY"


@dataclass(frozen=True)
class Interpreter:
    """A Python program, and the variables that it is to be started with."""

    program: str
    variables: dict[str, str]


def find_interpreter(environment: str, model_directory: Path) -> Interpreter:
    """The Python of an environment (a folder of conda or venv, or such a folder packed as tar); "" is the server's own.

    Blocks while an archive is unpacked, which happens once in the life of the server. Raises `InvalidArgument`.
    """
    if not environment:
        return Interpreter(sys.executable, dict(os.environ))
    path = Path(environment.replace(_MODEL_DIRECTORY, str(model_directory)))
    if path.is_file():
        folder = _archives.unpack(path)
    elif path.is_dir():
        folder = path.absolute()
    else:
        raise InvalidArgument(f"EXECUTION_ENV_PATH '{path}' does not exist")
    for name in ("python", "python3"):
        program = folder / "bin" / name
        if os.access(program, os.X_OK):
            return Interpreter(str(program), _activated(folder))
    raise InvalidArgument(f"EXECUTION_ENV_PATH '{path}' holds no environment: there is no bin/python in it")


def _activated(folder: Path) -> dict[str, str]:
    """What the environment's own activation would set."""
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONHOME"}
    variables["PATH"] = f"{folder / 'bin'}{os.pathsep}{variables.get('PATH', os.defpath)}"
    if (folder / "pyvenv.cfg").exists():
        variables["VIRTUAL_ENV"] = str(folder)
    else:
        variables["CONDA_PREFIX"] = str(folder)
        libraries = [str(folder / "lib"), *filter(None, [variables.get("LD_LIBRARY_PATH")])]
        variables["LD_LIBRARY_PATH"] = os.pathsep.join(libraries)
    return variables


class _Archives:
    """Archives that were unpacked, into folders that go when the server ends."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._folders: dict[tuple[str, int, int], tempfile.TemporaryDirectory[str]] = {}

    def unpack(self, archive: Path) -> Path:
        """Raises `InvalidArgument` for what is no archive."""
        status = archive.stat()
        key = str(archive.resolve()), status.st_size, status.st_mtime_ns
        with self._lock:
            if key not in self._folders:
                self._folders[key] = _unpack(archive)
            return Path(self._folders[key].name)


def _unpack(archive: Path) -> tempfile.TemporaryDirectory[str]:
    folder = tempfile.TemporaryDirectory(prefix="neso-environment-", ignore_cleanup_errors=True)
    try:
        with tarfile.open(archive) as packed:
            # Links may lead anywhere, as those of a venv to its Python do; files may not.
            packed.extractall(folder.name, filter="tar")
    except (tarfile.TarError, OSError) as error:
        folder.cleanup()
        raise InvalidArgument(f"EXECUTION_ENV_PATH '{archive}' cannot be unpacked: {error}") from None
    return folder


_archives = _Archives()

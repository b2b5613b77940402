"""Start of Python model processes: find the interpreter (`EXECUTION_ENV_PATH`), spawn, auto-complete."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tarfile
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from neso.backends.python.description import PythonSettings
from neso.backends.python.model_module import ModelCode
from neso.backends.python.process.codec import Decoder, encode, log_level, write_log_record
from neso.backends.python.process.messages import AutoComplete, AutoCompleted, Log
from neso.backends.python.process.shared_memory import make_file
from neso.server.errors import InternalError, InvalidArgument

_MODEL_DIRECTORY = "$$TRITON_MODEL_DIRECTORY"


@dataclass(frozen=True)
class Interpreter:
    """Path of a Python interpreter, and its environment variables."""

    program: str
    variables: dict[str, str]


def find_interpreter(environment: str, model_directory: Path) -> Interpreter:
    """Find the interpreter of an environment: a conda or venv folder, a tar archive of it, or "" (server's Python).

    Blocks while an archive is unpacked. Each archive is unpacked once. Raises `InvalidArgument`.
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
    raise InvalidArgument(f"EXECUTION_ENV_PATH '{path}' contains no environment: bin/python is missing")


def _activated(folder: Path) -> dict[str, str]:
    """Return the environment variables that the environment's activation script sets."""
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
    """Unpacked archives, in temporary folders that are deleted when the server exits."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._folders: dict[tuple[str, int, int], tempfile.TemporaryDirectory[str]] = {}

    def unpack(self, archive: Path) -> Path:
        """Unpack an archive, unless already unpacked. Raises `InvalidArgument` if it cannot be read."""
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
            # The filter "tar" allows absolute links (a venv links to its Python), but not files outside the folder.
            packed.extractall(folder.name, filter="tar")
    except (tarfile.TarError, OSError) as error:
        folder.cleanup()
        raise InvalidArgument(f"EXECUTION_ENV_PATH '{archive}' cannot be unpacked: {error}") from None
    return folder


_archives = _Archives()


_PROGRAM = Path(__file__).with_name("bootstrap.py")


class SpawnedProcess:
    """A child process, its socket and its shared-memory files. Owns the descriptors."""

    def __init__(self, interpreter: Interpreter, memory_name: str) -> None:
        self.from_server, self.to_server = make_file(memory_name), make_file(memory_name)
        self.socket, child_socket = socket.socketpair()
        passed = (child_socket.fileno(), self.from_server.fileno(), self.to_server.fileno())
        try:
            self.process = subprocess.Popen(
                [interpreter.program, str(_PROGRAM), *map(str, passed)],
                pass_fds=passed,
                stdin=subprocess.DEVNULL,
                env=interpreter.variables,
            )
        except OSError:
            self.close()
            raise
        finally:
            child_socket.close()

    def close(self) -> None:
        """Close the descriptors. Mapped memory stays valid."""
        self.socket.close()
        self.from_server.close()
        self.to_server.close()


def describe_exit(code: int) -> str:
    """Describe a return code of `Popen`."""
    if code >= 0:
        return f"exit status {code}"
    try:
        return f"signal {signal.Signals(-code).name}"
    except ValueError:
        return f"signal {-code}"


def complete_in_process(
    config: dict[str, Any], directory: Path, code: ModelCode, settings: PythonSettings
) -> dict[str, Any]:
    """Run `auto_complete_config` of a model in a child process. Blocks. Raises `ServerError`."""
    interpreter = find_interpreter(settings.environment, directory)
    spawned = SpawnedProcess(interpreter, settings.shm_name)
    try:
        spawned.socket.settimeout(settings.stub_timeout)
        spawned.socket.sendall(encode(AutoComplete(str(code.file), str(code.folder), config, log_level())))
        result = _receive_completed(spawned)
    except TimeoutError:
        raise InternalError(
            f"the process for auto_complete_config of model '{config['name']}' did not start within "
            f"{settings.stub_timeout:g} s"
        ) from None
    except OSError:
        result = None
    finally:
        status = _end_process(spawned)
    if result is None:
        raise InternalError(
            f"the process for auto_complete_config of model '{config['name']}' ended with {describe_exit(status)}"
        )
    if result.config is None:
        raise InvalidArgument(result.error or "")
    return result.config


def _receive_completed(spawned: SpawnedProcess) -> AutoCompleted | None:
    decoder = Decoder()
    while data := spawned.socket.recv(1 << 16):
        spawned.socket.settimeout(None)  # the process is up; importing the model has no time limit
        for message in decoder.feed(data):
            if isinstance(message, AutoCompleted):
                return message
            if isinstance(message, Log):
                write_log_record(message)
    return None


def _end_process(spawned: SpawnedProcess) -> int:
    """Wait briefly, then kill the process, because threads of the model can keep it alive. Returns the exit code."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        spawned.process.wait(0.5)
    spawned.process.kill()
    spawned.close()
    return spawned.process.wait()

"""Have a model complete its configuration in a process of its own."""

from __future__ import annotations

import contextlib
import logging
import subprocess
from pathlib import Path
from typing import Any

from neso.backends.python.process.environment import find_interpreter
from neso.backends.python.process.messages import Complete, Completed, Log
from neso.backends.python.process.server_log import write
from neso.backends.python.process.spawn import Spawned, how_it_ended
from neso.backends.python.process.wire import Decoder, encode
from neso.backends.python.settings import PythonSettings
from neso.server.errors import InternalError, InvalidArgument


def complete_in_process(
    config: dict[str, Any], directory: Path, path: Path, settings: PythonSettings
) -> dict[str, Any]:
    """What the `auto_complete_config` of the model in `path` makes of a configuration. Blocks. Raises `ServerError`."""
    interpreter = find_interpreter(settings.environment, directory)
    spawned = Spawned(interpreter, settings.shm_name)
    try:
        spawned.socket.settimeout(settings.stub_timeout)
        level = logging.getLogger("neso.model").getEffectiveLevel()
        spawned.socket.sendall(encode(Complete(str(path.absolute()), config, level)))
        result = _result(spawned)
    except TimeoutError:
        raise InternalError(
            f"the process for auto_complete_config of model '{config['name']}' did not come up in "
            f"{settings.stub_timeout:g} s"
        ) from None
    except OSError:
        result = None
    finally:
        code = _end(spawned)
    if result is None:
        raise InternalError(
            f"the process for auto_complete_config of model '{config['name']}' ended with {how_it_ended(code)}"
        )
    if result.config is None:
        raise InvalidArgument(result.error or "")
    return result.config


def _result(spawned: Spawned) -> Completed | None:
    decoder = Decoder()
    while data := spawned.socket.recv(1 << 16):
        spawned.socket.settimeout(None)  # it has come up; importing the model may take its time
        for message in decoder.feed(data):
            if isinstance(message, Completed):
                return message
            if isinstance(message, Log):
                write(message)
    return None


def _end(spawned: Spawned) -> int:
    """The exit status; by force, as threads of the model may go on."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        spawned.process.wait(0.5)
    spawned.process.kill()
    spawned.close()
    return spawned.process.wait()

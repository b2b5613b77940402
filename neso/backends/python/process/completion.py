"""Have a model complete its configuration in a process of its own."""

from __future__ import annotations

import logging
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
        level = logging.getLogger("neso.model").getEffectiveLevel()
        spawned.socket.sendall(encode(Complete(str(path.absolute()), config, level)))
        result = _result(spawned)
    except OSError:
        result = None
    finally:
        if spawned.process.poll() is None:
            spawned.socket.shutdown(2)
        code = spawned.process.wait()
        spawned.close()
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
        for message in decoder.feed(data):
            if isinstance(message, Completed):
                return message
            if isinstance(message, Log):
                write(message)
    return None

"""What the server's options and a model's configuration say of how the model is to run."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from neso.server.errors import InvalidArgument, Unsupported

_MODE = "EXECUTION_MODE"
_ENVIRONMENT = "EXECUTION_ENV_PATH"
_CPU_ONLY = "FORCE_CPU_ONLY_INPUT_TENSORS"


@dataclass(frozen=True)
class PythonSettings:
    """How the instances of one model run. Sizes are in bytes.

    - in_process: each instance has a process of its own, not a thread of the server
    - environment: `EXECUTION_ENV_PATH` as it is written in the configuration, "" for the server's own Python
    - shm_default_size: of the shared memory of an instance at first, in each direction
    - shm_growth_size: it grows by multiples of this, at least to double its size
    - shm_name: by which the memory is listed in /proc/<pid>/maps
    - stub_timeout: seconds until a process must have come up
    """

    in_process: bool = False
    environment: str = ""
    shm_default_size: int = 1 << 20
    shm_growth_size: int = 1 << 20
    shm_name: str = "neso_python_backend"
    stub_timeout: float = 30.0

    @classmethod
    def of(cls, config: Any, backend_config: Mapping[str, str]) -> PythonSettings:
        """Of a `ModelConfig` message and the `--backend-config` of the Python backend. Raises `ServerError`."""
        parameters = {key: value.string_value for key, value in config.parameters.items()}
        environment = parameters.get(_ENVIRONMENT, "")
        cpu_only = parameters.get(_CPU_ONLY, "yes")
        if cpu_only not in ("yes", "no"):
            raise InvalidArgument(
                f"Incorrect value for {_CPU_ONLY}: {cpu_only}, expected 'yes' or 'no', for {config.name}"
            )
        mode = parameters.get(_MODE) or backend_config.get("execution-mode") or ""
        if mode not in ("", "thread", "process"):
            raise InvalidArgument(
                f"unknown execution mode '{mode}', expected 'thread' or 'process', for {config.name}"
            )
        if environment and parameters.get(_MODE) == "thread":
            raise InvalidArgument(f"{_ENVIRONMENT} needs {_MODE} 'process', for {config.name}")
        in_process = mode == "process" or bool(environment)
        if in_process and sys.platform != "linux":
            raise Unsupported(f"processes for Python models are for Linux only, for {config.name}")
        return cls(
            in_process=in_process,
            environment=environment,
            shm_default_size=_positive(backend_config, "shm-default-byte-size", 1 << 20),
            shm_growth_size=_positive(backend_config, "shm-growth-byte-size", 1 << 20),
            shm_name=_name(backend_config.get("shm-region-prefix-name") or "neso_python_backend"),
            stub_timeout=float(_positive(backend_config, "stub-timeout-seconds", 30)),
        )


def _positive(backend_config: Mapping[str, str], key: str, default: int) -> int:
    text = backend_config.get(key, str(default))
    if not text.isascii() or not text.isdigit() or int(text) <= 0:
        raise InvalidArgument(f"{key} of the python backend must be an integer > 0, got '{text}'")
    return int(text)


def _name(text: str) -> str:
    if len(text.encode()) > 200 or "\0" in text:
        raise InvalidArgument(
            "shm-region-prefix-name of the python backend must be text of at most 200 bytes"
        )
    return text

"""`neso worker`: execute requests of a server that runs elsewhere."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys
from typing import Any

from neso.cli.flag_command import FlagCommand, help_text
from neso.cli.flag_values import FlagValues, OptionError
from neso.cli.serve_flags import ENGINE_CONFIG, ENGINE_FLAGS, LORA_MODULES, SPECULATIVE_CONFIG
from neso.flags import Flag, number

SUMMARY = "Execute requests of a server on this host or another one: an engine that pulls work from the server's queue."
_MODEL = (
    "The checkpoint that the server serves: a directory or an org/name on the hub. Default: the small model that is "
    "part of the package."
)
_SERVER_ONLY = (
    *("data-parallel-size", "rank-address", "workers", "prefill-workers", "decode-workers"),
    *("min-remote-prefill", "worker-address", "worker-token-file"),
)
TOPICS: dict[str, tuple[Flag, ...]] = {
    "Worker": (
        Flag("join", "Address of the server, its --worker-address.", metavar="ADDRESS"),
        Flag(
            "token-file", "File with the secret of the server; needed for tcp:// addresses.", metavar="PATH"
        ),
        Flag(
            "roles",
            "What the worker does: compute prompts for others (prefill), generate text (decode), or both.",
            default="prefill,decode",
            metavar="ROLES",
        ),
        Flag("name", "Name of the worker, unique among those of the server.", default_text="HOST-PID"),
        Flag("drain-seconds", "Seconds to finish running requests after SIGTERM.", number(0.0), 30.0),
    ),
    "Engine": (
        *(flag for flag in ENGINE_FLAGS if flag.name not in _SERVER_ONLY),
        LORA_MODULES,
        SPECULATIVE_CONFIG,
        ENGINE_CONFIG,
    ),
}
FLAGS = tuple(flag for flags in TOPICS.values() for flag in flags)


class WorkerCommand(FlagCommand):
    @staticmethod
    def help_of() -> str:
        return help_text("neso worker [OPTIONS] --join ADDRESS [MODEL]", SUMMARY, {"MODEL": _MODEL, **TOPICS})


def run(texts: dict[str, list[str]]) -> int:
    """Run the command until SIGTERM or Ctrl-C; returns the exit status."""
    from neso.cluster.worker_process import run_worker
    from neso.engine.errors import EngineError

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    try:
        options = _read(texts)
        asyncio.run(run_worker(options))
    except (OptionError, EngineError) as error:
        print(f"neso worker: {error}", file=sys.stderr)
        return 2 if isinstance(error, OptionError) else 1
    return 0


def _read(texts: dict[str, list[str]]) -> Any:
    """Return the `WorkerOptions`. Raises `OptionError`, `EngineError`."""
    from neso.cli.serve_options import SHIPPED_MODEL, engine_options
    from neso.cluster.sockets import read_token
    from neso.cluster.worker import WorkerOptions, worker_config
    from neso.engine.cluster_config import MIXED, check_address
    from neso.engine.config import EngineConfig
    from neso.engine.weights.hub import ModelNotFound, resolve_model

    values = FlagValues.read(FLAGS, texts)
    models = values["models"] or [SHIPPED_MODEL]
    address = values["join"]
    if len(models) > 1:
        raise OptionError("a worker has one MODEL")
    if not address:
        raise OptionError("--join is required: the --worker-address of the server")
    roles = frozenset(values["roles"].split(","))
    if not roles <= MIXED:
        raise OptionError(f"--roles: expected prefill, decode or prefill,decode, got '{values['roles']}'")
    try:
        check_address("--join", address, values["token-file"])
        config = EngineConfig.from_options(str(resolve_model(models[0])), engine_options(values))
    except (ModelNotFound, ValueError) as error:
        raise OptionError(str(error)) from None
    if config.cluster.enabled or config.data_parallel_size is not None:
        raise OptionError("--engine-config: a worker has one engine and no workers of its own")
    return WorkerOptions(
        config=worker_config(config, transfers=roles != MIXED),
        roles=roles,
        address=address,
        name=values["name"] or f"{socket.gethostname()}-{os.getpid()}",
        token=read_token(values["token-file"]),
        drain_seconds=values["drain-seconds"],
    )

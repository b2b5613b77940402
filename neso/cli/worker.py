"""`neso worker`: execute requests of a server that runs elsewhere."""

from __future__ import annotations

import asyncio
import logging
import re
import sys
from typing import Any

from neso.cli.flag_command import FlagCommand, help_text
from neso.cli.flag_values import FlagValues, OptionError
from neso.cli.serve_flags import ENGINE_CONFIG, ENGINE_FLAGS, LORA_MODULES, SPECULATIVE_CONFIG
from neso.flags import Flag, declarations, flags_of, integer, number
from neso.server.options import ServerOptions

SUMMARY = (
    "Execute requests of a server on this host or another one: an engine, or with --stage a model of a repository, "
    "that pulls work from the server's queue."
)
_MODEL = (
    "The checkpoint that the server serves: a directory or an org/name on the hub. Default: the small model that is "
    "part of the package."
)
_SERVER_ONLY = (
    *("data-parallel-size", "rank-address", "workers", "prefill-workers", "decode-workers"),
    *("min-remote-prefill", "worker-address", "worker-token-file"),
)
_REPOSITORY = (
    *("model-repository", "model-config-name", "disable-auto-complete-config", "strict-model-config"),
    *("backend-directory", "backend-config"),
)
_REPOSITORY_FIELDS = (
    *("model_repository", "model_config_name", "disable_auto_complete_config"),
    *("backend_directory", "backend_config"),
)
TOPICS: dict[str, tuple[Flag, ...]] = {
    "Worker": (
        Flag(
            "join",
            "The --worker-address or --stage-address of the server: tcp://HOST:PORT, ipc://PATH, or nats://HOST:PORT.",
            metavar="ADDRESS",
        ),
        Flag(
            "token-file",
            "File with the secret of the server, needed for tcp:// addresses, or with the token of NATS.",
            metavar="PATH",
        ),
        Flag(
            "roles",
            "What the worker does: compute prompts for others (prefill), generate text (decode), or both.",
            default="prefill,decode",
            metavar="ROLES",
        ),
        Flag("name", "Name of the worker, unique among those of the server.", default_text="HOST-PID"),
        Flag("drain-seconds", "Seconds to finish running requests after SIGTERM.", number(0.0), 30.0),
        Flag("log-verbose", "1: log each request.", integer(0), 0),
    ),
    "Stage": (
        Flag("stage", "Execute this model of the repository instead of a MODEL.", metavar="NAME"),
        *(flag for flag in flags_of(ServerOptions, "Models") if flag.name in _REPOSITORY),
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
    from neso.cluster.agent import run_agent
    from neso.cluster.stages.worker import StageAgent
    from neso.cluster.worker import Worker
    from neso.engine.errors import EngineError
    from neso.server.errors import ServerError

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    try:
        values = FlagValues.read(FLAGS, texts)
        if values["stage"]:
            asyncio.run(run_agent(StageAgent, _read_stage(values)))
        else:
            asyncio.run(run_agent(Worker, _read(values)))
    except (OptionError, EngineError, ServerError) as error:
        print(f"neso worker: {error}", file=sys.stderr)
        return 2 if isinstance(error, OptionError) else 1
    return 0


def _read_stage(values: FlagValues) -> Any:
    """Return the `StageWorkerOptions`. Raises `OptionError`, `EngineError`, `ServerError`."""
    from neso.cluster.stages.worker import StageWorkerOptions
    from neso.engine.cluster_config import check_address

    if values["models"]:
        raise OptionError("a worker has one MODEL, or one model of a repository with --stage")
    if not values["model-repository"]:
        raise OptionError("--stage needs --model-repository")
    if not values["join"]:
        raise OptionError("--join is required: the --stage-address of the server")
    try:
        check_address("--join", values["join"], values["token-file"])
    except ValueError as error:
        raise OptionError(str(error)) from None
    defaults, fields = ServerOptions(), declarations(ServerOptions)
    others = {name: getattr(defaults, name) for name in fields if name not in _REPOSITORY_FIELDS}
    server = values.build(ServerOptions, **others)
    return StageWorkerOptions(
        model=values["stage"],
        repositories=[str(path) for path in server.model_repository],
        address=values["join"],
        name=_name(values),
        token_file=values["token-file"],
        drain_seconds=values["drain-seconds"],
        verbose=values["log-verbose"] > 0,
        backend_config=server.backend_config,
        backend_directory=None if server.backend_directory is None else str(server.backend_directory),
        model_config_name=server.model_config_name,
        disable_auto_complete_config=server.disable_auto_complete_config,
    )


def _name(values: FlagValues) -> str:
    from neso.cluster.worker_options import default_name

    return values["name"] or default_name()


def _read(values: FlagValues) -> Any:
    """Return the `WorkerOptions`. Raises `OptionError`, `EngineError`."""
    from neso.cli.serve_options import SHIPPED_MODEL, engine_options
    from neso.cluster.jetstream.connection import NatsOptions
    from neso.cluster.sockets import read_token
    from neso.cluster.worker_options import WorkerOptions, worker_config
    from neso.engine.cluster_config import MIXED, check_address, is_nats
    from neso.engine.config import EngineConfig
    from neso.engine.weights.hub import ModelNotFound, resolve_model

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
        if not is_nats(address):
            check_address("--join", address, values["token-file"])
        config = EngineConfig.from_options(str(resolve_model(models[0])), engine_options(values))
    except (ModelNotFound, ValueError) as error:
        raise OptionError(str(error)) from None
    if config.cluster.enabled or config.data_parallel_size is not None:
        raise OptionError("--engine-config: a worker has one engine and no workers of its own")
    name = _name(values)
    nats = (
        NatsOptions.of(config.cluster, address, config.model, values["token-file"])
        if is_nats(address)
        else None
    )
    if nats is not None and not re.fullmatch(r"[A-Za-z0-9_-]+", name):
        raise OptionError(f"--name: expected letters, digits, '-' and '_', got '{name}'")
    return WorkerOptions(
        config=worker_config(config, transfers=roles != MIXED),
        roles=roles,
        address=address if nats is None else nats,
        name=name,
        token=read_token(values["token-file"]) if nats is None else None,
        drain_seconds=values["drain-seconds"],
        verbose=values["log-verbose"] > 0,
    )

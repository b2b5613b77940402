"""Leader mode of `neso serve`: one of several processes that mpirun, srun, torchrun or a LeaderWorkerSet has started.

Rank 0 serves all protocols. The others only execute the steps of one model together with rank 0, and exit with it.
"""

from __future__ import annotations

import logging
import signal
from dataclasses import replace

from neso.cli.flag_values import OptionError
from neso.cli.serve_options import ENGINE_BACKENDS, ServeOptions
from neso.engine.errors import EngineError
from neso.engine.parallel.handshake import rank_secret
from neso.engine.parallel.launched_rank import LaunchedRank

logger = logging.getLogger("neso")

RANK_MODEL = "tensorrt_llm"
"""Default of `--rank-model`: the name of the model in TensorRT-LLM's repositories."""


def rank_address(options: ServeOptions, launched: LaunchedRank) -> str:
    """Return where rank 0 listens for the others.

    Raises `OptionError` if it is unknown, or if the ranks have no secret to recognize each other.
    """
    address = options.rank_address or launched.address
    if address is None:
        raise OptionError(
            f"{launched.launcher} has started {launched.size} ranks on several hosts: pass --rank-address "
            "HOST:PORT, an address of rank 0, to all of them"
        )
    try:
        rank_secret(address)
    except EngineError as error:
        raise OptionError(str(error)) from None
    return address


def lead(options: ServeOptions, launched: LaunchedRank) -> ServeOptions:
    """Return the options of rank 0: one model runs on the ranks. Raises `OptionError`."""
    address, model = rank_address(options, launched), rank_model(options)
    logger.info("%s: rank 0 of %d, model '%s' runs on the ranks", launched.launcher, launched.size, model)
    settings = {"ranks": str(launched.size), "rank-address": address, "rank-model": model}
    config = options.server.backend_config
    config = {**config, **{name: {**config.get(name, {}), **settings} for name in ENGINE_BACKENDS}}
    engine = {name: value for name, value in options.engine.items() if name != "rank_address"}
    return replace(options, engine=engine, server=replace(options.server, backend_config=config))


def follow(options: ServeOptions, launched: LaunchedRank) -> int:
    """Execute the steps of rank 0 until it ends; returns the exit status. Raises `OptionError`."""
    address = rank_address(options, launched)
    logger.info("%s: rank %d of %d, follows %s", launched.launcher, launched.rank, launched.size, address)
    from neso.engine.parallel.rank_process import main

    # Launchers signal all ranks. Rank 0 finishes its requests, for which it needs this one, and then tells it to end.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)

    return main(address)


def rank_model(options: ServeOptions) -> str:
    """Return the name of the model that runs on the ranks."""
    if options.rank_model is not None:
        return options.rank_model
    return options.models[0].name if len(options.models) == 1 else RANK_MODEL

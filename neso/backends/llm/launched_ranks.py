"""Leader mode: a model on the ranks that mpirun, srun or torchrun has started beside the server.

`neso serve` passes these settings to the backend:

- ranks: number of ranks
- rank-address: HOST:PORT at which rank 0 listens for the others
- rank-model: name of the model that runs on the ranks; other models run without them
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from neso.engine.config import EngineConfig
from neso.server.device_claims import DeviceClaims
from neso.server.errors import InvalidArgument


def with_launched_ranks(config: EngineConfig, model: str, settings: Mapping[str, str]) -> EngineConfig:
    """Return the options of a model with the launched ranks, if it is the one that runs on them.

    Without tensor_parallel_size, each layer is split among the ranks that pipeline_parallel_size leaves. Raises
    `InvalidArgument` if the options need another number of ranks.
    """
    if settings.get("rank-model") != model:
        return config
    size = int(settings["ranks"])
    if config.tensor_parallel_size == 1 and size % config.pipeline_parallel_size == 0:
        config = replace(config, tensor_parallel_size=size // config.pipeline_parallel_size)
    if config.num_ranks != size:
        raise InvalidArgument(
            f"{size} ranks were started, but tensor_parallel_size {config.tensor_parallel_size} and "
            f"pipeline_parallel_size {config.pipeline_parallel_size} need {config.num_ranks}"
        )
    return replace(config, rank_address=settings["rank-address"])


def claim_launched_ranks(claims: DeviceClaims, config: EngineConfig, model: str, engines: int) -> None:
    """Take the ranks of the launcher for a model that runs on them. Raises `InvalidArgument`.

    They can be taken once, because their processes end with the model.
    """
    if config.rank_address is None:
        return
    if engines > 1:
        raise InvalidArgument(
            f"{engines} engines cannot run on the ranks of one launcher; set their number to 1"
        )
    if not claims.claim_ranks(config.rank_address):
        raise InvalidArgument(
            f"the ranks of model '{model}' were started beside the server and ended with the model; only the launcher "
            "can start them again: start the job again"
        )


def check_participants(participants: Sequence[int], config: EngineConfig, instances: int) -> None:
    """Check `participant_ids`: the ranks of the model among those of the launcher. Raises `InvalidArgument`.

    In leader mode all ranks run the model. A server that starts the ranks itself needs none of the launcher, so only
    their number says something about the model.
    """
    given = ",".join(map(str, participants))
    if config.rank_address is not None:
        if sorted(participants) != list(range(config.num_ranks)):
            raise InvalidArgument(
                f"participant_ids {given}: in leader mode the model runs on all ranks of the job, 0 to "
                f"{config.num_ranks - 1}; use orchestrator mode (--multi-model) for several models"
            )
        return
    if len(set(participants)) != len(participants) or len(participants) not in (
        config.num_ranks,
        config.num_ranks * (config.data_parallel_size or instances),
    ):
        raise InvalidArgument(
            f"participant_ids {given}: expected {config.num_ranks} different ranks, because tensor_parallel_size is "
            f"{config.tensor_parallel_size} and pipeline_parallel_size {config.pipeline_parallel_size}"
        )

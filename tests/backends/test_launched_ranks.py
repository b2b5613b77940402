"""Options of the model that runs on the ranks of a launcher, and `participant_ids`."""

from __future__ import annotations

import pytest

from neso.backends.llm.launched_ranks import check_participants, claim_launched_ranks, with_launched_ranks
from neso.engine.config import EngineConfig
from neso.server.device_claims import DeviceClaims
from neso.server.errors import InvalidArgument

SETTINGS = {"ranks": "4", "rank-address": "/tmp/ranks", "rank-model": "m"}


def config(**options: int) -> EngineConfig:
    return EngineConfig.from_options("model", options)


@pytest.mark.parametrize("pipeline", [1, 2])
def test_layers_are_split_among_the_ranks_that_stages_leave(pipeline: int) -> None:
    found = with_launched_ranks(config(pipeline_parallel_size=pipeline), "m", SETTINGS)
    assert (found.tensor_parallel_size, found.rank_address) == (4 // pipeline, "/tmp/ranks")
    assert with_launched_ranks(found, "m", SETTINGS) == found


def test_other_models_and_other_numbers_of_ranks() -> None:
    assert with_launched_ranks(config(), "other", SETTINGS) == config()
    with pytest.raises(InvalidArgument, match="4 ranks were started"):
        with_launched_ranks(config(tensor_parallel_size=2), "m", SETTINGS)


def test_ranks_of_a_launcher_run_one_model_once() -> None:
    claims, launched = DeviceClaims(), with_launched_ranks(config(), "m", SETTINGS)
    with pytest.raises(InvalidArgument, match="2 engines cannot run on the ranks of one launcher"):
        claim_launched_ranks(claims, launched, "m", 2)
    claim_launched_ranks(claims, launched, "m", 1)
    with pytest.raises(InvalidArgument, match="ended with the model; only the launcher can start"):
        claim_launched_ranks(claims, launched, "m", 1)
    claim_launched_ranks(claims, config(tensor_parallel_size=2), "own", 2)


def test_participants_in_leader_mode_are_all_ranks() -> None:
    launched = with_launched_ranks(config(), "m", SETTINGS)
    check_participants([0, 1, 2, 3], launched, 1)
    for wrong in ([1, 2, 3, 4], [0, 1], [0, 1, 2, 2]):
        with pytest.raises(InvalidArgument, match="all ranks of the job, 0 to 3"):
            check_participants(wrong, launched, 1)


def test_participants_of_a_server_that_starts_its_ranks_are_as_many_as_the_ranks() -> None:
    own = config(tensor_parallel_size=2)
    check_participants([1, 2], own, 1)
    check_participants([1, 2, 3, 4], own, 2)
    for wrong in ([1], [1, 2, 3], [2, 2]):
        with pytest.raises(InvalidArgument, match="expected 2 different ranks"):
            check_participants(wrong, own, 2)

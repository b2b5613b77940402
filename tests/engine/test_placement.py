"""CPUs, threads and GPUs of the engines of a model."""

from __future__ import annotations

import os

import pytest

from neso.engine.config import EngineConfig
from neso.engine.host_resources import available_cores, parse_cpu_list
from neso.engine.placement import place_engines

OWN = sorted(os.sched_getaffinity(0))


def config(**options: object) -> EngineConfig:
    return EngineConfig.from_options("model", options)


def test_single_engine_is_not_bound():
    (placed,) = place_engines(config(), 1, gpus=("0", "1"))
    assert (placed.cpus, placed.device_ids, placed.num_threads) == (None, None, None)


def test_engines_get_disjoint_cpus_and_as_many_threads():
    if len(OWN) < 2:
        pytest.skip("one CPU")
    first, second = place_engines(config(), 2)
    sets = [set(parse_cpu_list(placed.cpus or "")) for placed in (first, second)]
    assert sets[0] | sets[1] == set(OWN) and not sets[0] & sets[1]
    assert first.num_threads == max(1, available_cores() // 2)
    assert place_engines(config(num_threads=3), 2)[0].num_threads == 3


def test_cpus_of_the_options_are_used():
    assert [placed.cpus for placed in place_engines(config(cpus="0;1"), 2)] == ["0", "1"]
    assert [placed.cpus for placed in place_engines(config(cpus="0-1"), 2)] == ["0", "1"]
    assert place_engines(config(cpus="1"), 1)[0].cpus == "1"


def test_gpus_are_divided_if_there_are_enough():
    def devices(count: int, gpus: tuple[str, ...], **options: object) -> list[str | None]:
        return [placed.device_ids for placed in place_engines(config(**options), count, gpus)]

    assert devices(2, ("0", "1", "2", "3")) == ["0,1", "2,3"]
    assert devices(2, ("0",)) == [None, None]
    assert devices(2, (), device_ids="0,1;2,3") == ["0,1", "2,3"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cpus": "0;1;2"}, "cpus: 3 sets, separated by ';', for 2 engines"),
        ({"cpus": "zero"}, "cpus: expected CPUs such as 0-3,8"),
        ({"device_ids": "0,1"}, "device_ids: 1 sets, separated by ';', for 2 engines"),
    ],
)
def test_wrong_sets_are_rejected(options, message):
    with pytest.raises(ValueError, match=message):
        place_engines(config(**options), 2)

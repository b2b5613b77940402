"""Physical cores, default threads and CPU sets of engines in fake /sys trees of large machines."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_host_resources import cpus, v1, v2, write

from neso.engine.host_resources import available_cores, physical_cores, split_cpus


def nodes(*sets: list[int]) -> dict[str, str]:
    """Return files that say that the CPUs of the sets are on nodes 0, 1, and so on."""
    return {
        f"sys/devices/system/cpu/cpu{cpu}/node{node}/cpulist": ""
        for node, own in enumerate(sets)
        for cpu in own
    }


def test_two_sockets_with_hyperthreads(tmp_path: Path) -> None:
    """Hyperthreads of core i are i and i + 8; cores 0 to 3 are on node 0."""
    sockets = [[0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7, 12, 13, 14, 15]]
    write(tmp_path, cpus(16, threads_per_core=2) | nodes(*sockets))
    assert available_cores(tmp_path, range(16)) == 8
    found = physical_cores(tmp_path, range(16))
    assert [core.cpus for core in found] == [[core, core + 8] for core in range(8)]
    assert [core.node for core in found] == [0] * 4 + [1] * 4
    assert split_cpus(2, tmp_path, range(16)) == sockets, "an engine per socket"


def test_sub_numa_clusters_are_nodes(tmp_path: Path) -> None:
    """Two sockets with two clusters each, whose CPUs are numbered in turns."""
    clusters = [[0, 2], [1, 3], [4, 6], [5, 7]]
    write(tmp_path, cpus(8) | nodes(*clusters))
    assert [core.node for core in physical_cores(tmp_path, range(8))] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert split_cpus(4, tmp_path, range(8)) == clusters, "an engine per cluster"


@pytest.mark.parametrize("version", [1, 2])
def test_quota_of_one_and_a_half_cpus_is_one_thread(tmp_path: Path, version: int) -> None:
    write(tmp_path, cpus(8))
    if version == 2:
        write(tmp_path, v2("/a") | {"sys/fs/cgroup/a/cpu.max": "150000 100000"})
    else:
        group = "sys/fs/cgroup/cpu/a"
        write(tmp_path, v1("/a", "cpu") | {f"{group}/cpu.cfs_quota_us": "150000"})
        write(tmp_path, {f"{group}/cpu.cfs_period_us": "100000"})
    assert available_cores(tmp_path, range(8)) == 1


def test_holes_in_the_cpuset_are_not_used(tmp_path: Path) -> None:
    """CPU 9 is a hyperthread of core 1, whose other hyperthread is not in the cpuset."""
    write(tmp_path, cpus(16, threads_per_core=2) | nodes(list(range(16))))
    assert [core.cpus for core in physical_cores(tmp_path, [0, 2, 9, 10])] == [[0], [2, 10], [9]]


def test_hybrid_cores_count_alike(tmp_path: Path) -> None:
    """Two performance cores with two hyperthreads each, four efficiency cores."""
    siblings = ["0-1", "0-1", "2-3", "2-3", "4", "5", "6", "7"]
    write(
        tmp_path,
        {f"sys/devices/system/cpu/cpu{cpu}/topology/core_cpus_list": own for cpu, own in enumerate(siblings)},
    )
    assert [core.cpus for core in physical_cores(tmp_path, range(8))] == [[0, 1], [2, 3], [4], [5], [6], [7]]
    assert available_cores(tmp_path, range(8)) == 6

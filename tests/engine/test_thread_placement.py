"""Threads of a CPU runner on the cores and NUMA nodes of fake /sys trees."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_core_topology import nodes
from test_host_resources import cpus, v2, write

from neso.engine.thread_placement import ThreadPlacement, place_threads


def test_one_thread_per_core_on_two_sockets_with_hyperthreads(tmp_path: Path) -> None:
    """Hyperthreads of core i are i and i + 8; cores 0 to 3 are on node 0."""
    write(
        tmp_path,
        cpus(16, threads_per_core=2) | nodes([0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7, 12, 13, 14, 15]),
    )
    placed = place_threads(binding="core", root=tmp_path, cpus=range(16))
    assert placed.count == 8
    assert placed.cpus == [[core, core + 8] for core in range(8)]
    assert placed.nodes == [0, 1]
    assert placed.describe() == "8 threads, one per core on CPUs 0-15 of 2 NUMA nodes"


def test_threads_of_sub_numa_clusters(tmp_path: Path) -> None:
    """Two sockets with two clusters each; Linux numbers the CPUs of a cluster in turns."""
    write(tmp_path, cpus(8) | nodes([0, 2], [1, 3], [4, 6], [5, 7]))
    placed = place_threads(binding="core", root=tmp_path, cpus=range(8))
    assert placed.cpus == [[0], [2], [1], [3], [4], [6], [5], [7]]
    assert placed.nodes == [0, 1, 2, 3]


def test_threads_within_a_quota_are_bound_to_nodes(tmp_path: Path) -> None:
    """Other containers may use the same cores, so no thread gets one of its own."""
    write(tmp_path, cpus(8) | nodes([0, 1, 2, 3], [4, 5, 6, 7]) | v2("/a"))
    write(tmp_path, {"sys/fs/cgroup/a/cpu.max": "400000 100000"})
    placed = place_threads(root=tmp_path, cpus=range(8))
    assert placed.cpus == [[0, 1, 2, 3]] * 2 + [[4, 5, 6, 7]] * 2
    assert placed.nodes == [0, 1]
    assert placed.describe() == "4 threads, bound to NUMA nodes on CPUs 0-7 of 2 NUMA nodes"


def test_threads_are_bound_to_cpus_of_the_cpuset_only(tmp_path: Path) -> None:
    """CPU 9 is a hyperthread of core 1 whose sibling is not in the cpuset."""
    write(tmp_path, cpus(16, threads_per_core=2) | nodes(list(range(16))))
    placed = place_threads(binding="core", root=tmp_path, cpus=[0, 2, 9, 10])
    assert placed.cpus == [[0], [2, 10], [9]]
    assert placed.nodes == []


def test_threads_are_not_bound_on_one_node(tmp_path: Path) -> None:
    """Another process may use the same core, and a bound thread could not leave it."""
    write(tmp_path, cpus(8))
    placed = place_threads(root=tmp_path, cpus=range(8))
    assert placed == ThreadPlacement(8, [], [])
    assert placed.describe() == "8 threads, not bound to CPUs"
    assert place_threads(4, "core", tmp_path, range(8)).cpus == [[0], [2], [4], [6]]


def test_binding_can_be_chosen(tmp_path: Path) -> None:
    write(tmp_path, cpus(4) | nodes([0, 1], [2, 3]))
    assert place_threads(4, "none", tmp_path, range(4)) == ThreadPlacement(4, [], [])
    assert place_threads(4, "node", tmp_path, range(4)).cpus == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert place_threads(8, "auto", tmp_path, range(4)).cpus == [[0, 1]] * 4 + [[2, 3]] * 4
    with pytest.raises(ValueError, match="core needs a core for each thread, but 5 threads have 4"):
        place_threads(5, "core", tmp_path, range(4))

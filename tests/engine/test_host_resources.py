"""CPU and memory limits from the affinity mask and cgroups, in fake /proc and /sys trees."""

from __future__ import annotations

from pathlib import Path

import pytest

from neso.engine.host_resources import (
    available_cores,
    available_memory,
    format_cpu_list,
    parse_cpu_list,
    split_cpus,
)

V2_MOUNT = "30 23 0:26 {root} /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate"
V1_MOUNT = "31 30 0:28 {root} /sys/fs/cgroup/{name} rw,nosuid - cgroup cgroup rw,{name}"
MiB = 1 << 20


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    return root


def cpus(count: int, threads_per_core: int = 1) -> dict[str, str]:
    """Return topology files of `count` logical CPUs; hyperthreads of core i are i, i + cores, as on Linux."""
    cores = count // threads_per_core
    return {
        f"sys/devices/system/cpu/cpu{cpu}/topology/core_cpus_list": ",".join(
            str(cpu % cores + thread * cores) for thread in range(threads_per_core)
        )
        for cpu in range(count)
    }


def memory(available: int, total: int = 64 << 30) -> dict[str, str]:
    return {"proc/meminfo": f"MemTotal: {total >> 10} kB\nMemFree: 1 kB\nMemAvailable: {available >> 10} kB"}


def v2(path: str, root: str = "/") -> dict[str, str]:
    return {"proc/self/cgroup": f"0::{path}", "proc/self/mountinfo": V2_MOUNT.format(root=root)}


def v1(path: str, *names: str, root: str = "/") -> dict[str, str]:
    return {
        "proc/self/cgroup": "\n".join(f"{9 - i}:{name}:{path}" for i, name in enumerate(names)),
        "proc/self/mountinfo": "\n".join(V1_MOUNT.format(root=root, name=name) for name in names),
    }


def test_cores_without_topology_and_cgroups_are_the_cpus_of_the_mask(tmp_path):
    assert available_cores(tmp_path, range(6)) == 6
    assert available_cores(tmp_path, []) == 1


def test_hyperthreads_of_one_core_count_once(tmp_path):
    write(tmp_path, cpus(16, threads_per_core=2))
    assert available_cores(tmp_path, range(16)) == 8
    assert available_cores(tmp_path, [0, 8, 1]) == 2, "an affinity mask"


@pytest.mark.parametrize(
    ("quota", "expected"),
    [("max 100000", 8), ("400000 100000", 4), ("250000 100000", 2), ("50000 100000", 1), ("", 8), ("x 0", 8)],
)
def test_cpu_quota_of_cgroup_v2(tmp_path, quota, expected):
    write(tmp_path, {**v2("/a/b"), "sys/fs/cgroup/a/b/cpu.max": quota})
    assert available_cores(tmp_path, range(8)) == expected


def test_quota_of_a_parent_cgroup_applies(tmp_path):
    files = {"sys/fs/cgroup/a/b/cpu.max": "600000 100000", "sys/fs/cgroup/a/cpu.max": "300000 100000"}
    write(tmp_path, {**v2("/a/b"), **files})
    assert available_cores(tmp_path, range(8)) == 3


@pytest.mark.parametrize(("quota", "expected"), [("-1", 8), ("200000", 2)])
def test_cpu_quota_of_cgroup_v1(tmp_path, quota, expected):
    group = "sys/fs/cgroup/cpu/a"
    write(tmp_path, {**v1("/a", "memory", "cpu"), f"{group}/cpu.cfs_quota_us": quota})
    write(tmp_path, {f"{group}/cpu.cfs_period_us": "100000"})
    assert available_cores(tmp_path, range(8)) == expected


@pytest.mark.parametrize("path", ["/", "/docker/1234", "/../other"])
def test_container_with_its_cgroup_mounted(tmp_path, path):
    write(tmp_path, {**v2(path, root="/docker/1234"), "sys/fs/cgroup/cpu.max": "200000 100000"})
    assert available_cores(tmp_path, range(8)) == 2


def test_memory_without_cgroups_is_the_available_host_memory(tmp_path):
    write(tmp_path, memory(available=700 * MiB))
    assert available_memory(tmp_path) == 700 * MiB


def test_memory_within_the_limit_of_cgroup_v2_with_the_page_cache(tmp_path):
    files = {
        "memory.max": f"{1000 * MiB}",
        "memory.current": f"{900 * MiB}",
        "memory.stat": f"anon {500 * MiB}\ninactive_file {300 * MiB}\nactive_file {100 * MiB}\nshmem 0",
    }
    write(
        tmp_path, {**memory(2000 * MiB), **v2("/a"), **{f"sys/fs/cgroup/a/{n}": t for n, t in files.items()}}
    )
    assert available_memory(tmp_path) == 500 * MiB
    write(tmp_path, memory(available=200 * MiB))
    assert available_memory(tmp_path) == 200 * MiB, "the host has less"
    write(tmp_path, {**memory(2000 * MiB), "sys/fs/cgroup/a/memory.max": "max"})
    assert available_memory(tmp_path) == 2000 * MiB


def test_memory_limit_of_a_parent_cgroup_applies(tmp_path):
    files = {
        "a/b/memory.max": "max",
        "a/b/memory.current": "0",
        "a/memory.max": f"{100 * MiB}",
        "a/memory.current": f"{60 * MiB}",
    }
    write(
        tmp_path, {**memory(900 * MiB), **v2("/a/b"), **{f"sys/fs/cgroup/{n}": t for n, t in files.items()}}
    )
    assert available_memory(tmp_path) == 40 * MiB


def test_memory_limit_of_cgroup_v1(tmp_path):
    files = {
        "memory.limit_in_bytes": f"{800 * MiB}",
        "memory.usage_in_bytes": f"{600 * MiB}",
        "memory.stat": f"inactive_file 0\ntotal_inactive_file {100 * MiB}\ntotal_active_file {50 * MiB}",
    }
    group = "sys/fs/cgroup/memory/a"
    write(
        tmp_path,
        {**memory(2000 * MiB), **v1("/a", "memory"), **{f"{group}/{n}": t for n, t in files.items()}},
    )
    assert available_memory(tmp_path) == 350 * MiB
    write(tmp_path, {f"{group}/memory.limit_in_bytes": str(2**63 - 4096)})
    assert available_memory(tmp_path) == 2000 * MiB, "no limit"


def test_an_exceeded_limit_leaves_no_memory(tmp_path):
    files = {"sys/fs/cgroup/memory.max": "10", "sys/fs/cgroup/memory.current": "20"}
    write(tmp_path, {**memory(900 * MiB), **v2("/"), **files})
    assert available_memory(tmp_path) == 0


def test_cpus_are_split_by_core(tmp_path):
    write(tmp_path, cpus(8, threads_per_core=2))
    assert split_cpus(2, tmp_path, range(8)) == [[0, 1, 4, 5], [2, 3, 6, 7]]
    assert split_cpus(3, tmp_path, range(8)) == [[0, 4], [1, 5], [2, 3, 6, 7]]
    assert split_cpus(2, tmp_path, [0, 1, 2, 4]) == [[0, 4], [1, 2]], "CPUs outside the affinity are not used"


def test_cpus_are_split_by_numa_node(tmp_path):
    write(tmp_path, {f"sys/devices/system/cpu/cpu{cpu}/node{cpu % 2}/cpulist": "" for cpu in range(8)})
    assert split_cpus(2, tmp_path, range(8)) == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert split_cpus(4, tmp_path, range(8)) == [[0, 2], [4, 6], [1, 3], [5, 7]]


def test_cores_are_shared_if_there_are_fewer_than_parts(tmp_path):
    assert split_cpus(4, tmp_path, [3, 5]) == [[3], [5], [3], [5]]


@pytest.mark.parametrize(("text", "expected"), [("0", [0]), ("0-2,8", [0, 1, 2, 8]), ("8, 0-1", [0, 1, 8])])
def test_cpu_list(text, expected):
    assert parse_cpu_list(text) == expected
    assert parse_cpu_list(format_cpu_list(expected)) == expected


@pytest.mark.parametrize("text", ["", "a", "3-1", "1-", "-1", "1,,2"])
def test_invalid_cpu_list(text):
    with pytest.raises(ValueError, match="expected CPUs such as 0-3,8"):
        parse_cpu_list(text)


def test_this_machine():
    assert available_cores() >= 1 and available_memory() > 0

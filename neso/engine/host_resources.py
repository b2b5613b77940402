"""CPU cores and memory available to this process, within its CPU affinity and the limits of its cgroup (v1 and v2).

A container sees the CPUs and the memory of its host in /proc; its own limits are in the cgroup file system:

    limit       cgroup v2        cgroup v1
    CPU time    cpu.max          cpu.cfs_quota_us, cpu.cfs_period_us
    memory      memory.max       memory.limit_in_bytes
    usage       memory.current   memory.usage_in_bytes

The limits of a cgroup apply to the groups below it, so all groups from the process's own to the root are read. The page
cache counts towards the usage of a cgroup, but the kernel reclaims it when memory is needed, so it counts as available.
`root` is the directory that contains proc/ and sys/; tests use other directories.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from itertools import chain, pairwise
from pathlib import Path
from typing import NamedTuple

ROOT = Path("/")
_PAGE_CACHE = ("inactive_file", "active_file")


class Core(NamedTuple):
    """A physical core: its NUMA node (0 if unknown), and its logical CPUs that the process may use."""

    node: int
    cpus: list[int]


def physical_cores(root: Path = ROOT, cpus: Iterable[int] | None = None) -> list[Core]:
    """Return the cores of logical CPUs, by default of the affinity mask of this process, in the order of NUMA nodes."""
    cores: dict[tuple[int, str], list[int]] = {}
    for cpu in sorted(_affinity() if cpus is None else cpus):
        cores.setdefault((_node_of(root, cpu), _core_of(root, cpu)), []).append(cpu)
    return sorted(Core(node, own) for (node, _), own in cores.items())


def available_cores(root: Path = ROOT, cpus: Iterable[int] | None = None) -> int:
    """Return the number of physical cores available to this process: the default number of threads. At least 1.

    Hyperthreads of one core count once. A CPU quota is rounded down, because additional threads would be throttled.
    `cpus` are the logical CPUs of the process, by default its affinity mask.
    """
    cores = len(physical_cores(root, cpus))
    quotas = [quota for group in _cgroups(root, "cpu") if (quota := _cpu_quota(group)) is not None]
    return max(1, int(min([cores, *quotas])))


def split_cpus(parts: int, root: Path = ROOT, cpus: Iterable[int] | None = None) -> list[list[int]]:
    """Divide logical CPUs, by default the affinity mask of this process, into `parts` sets of almost equal size.

    Hyperthreads of a core stay together, and cores are divided in the order of their NUMA nodes, so that no set spans
    two nodes if `parts` is a multiple of the number of nodes. Sets overlap only if there are fewer cores than parts.
    """
    ordered = [core.cpus for core in physical_cores(root, cpus)]
    if len(ordered) < parts:
        return [ordered[part % len(ordered)] for part in range(parts)]
    bounds = [part * len(ordered) // parts for part in range(parts + 1)]
    return [sorted(chain.from_iterable(ordered[low:high])) for low, high in pairwise(bounds)]


def parse_cpu_list(text: str) -> list[int]:
    """Parse a list of CPUs in the kernel's notation: `0-3,8`. Raises `ValueError`."""
    cpus: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()) or (dash and int(last) < int(first)):
            raise ValueError(f"expected CPUs such as 0-3,8, got '{text}'")
        cpus.update(range(int(first), int(last or first) + 1))
    return sorted(cpus)


def format_cpu_list(cpus: Iterable[int]) -> str:
    """Format CPUs in the kernel's notation."""
    ranges: list[list[int]] = []
    for cpu in sorted(cpus):
        if ranges and ranges[-1][1] == cpu - 1:
            ranges[-1][1] = cpu
        else:
            ranges.append([cpu, cpu])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in ranges)


def available_memory(root: Path = ROOT) -> int:
    """Return the bytes that this process can allocate without swapping, within the limits of its cgroups."""
    available = _host_memory(root)
    for group in _cgroups(root, "memory"):
        limit = _read_int(group / "memory.max", group / "memory.limit_in_bytes")
        usage = _read_int(group / "memory.current", group / "memory.usage_in_bytes")
        if limit is not None and usage is not None:
            available = min(available, limit - usage + _page_cache(group))
    return max(0, available)


def _affinity() -> Iterable[int]:
    affinity = getattr(os, "sched_getaffinity", None)
    return affinity(0) if affinity else range(os.cpu_count() or 1)


def _node_of(root: Path, cpu: int) -> int:
    """Return the NUMA node of a logical CPU; 0 if unknown."""
    nodes = (root / f"sys/devices/system/cpu/cpu{cpu}").glob("node[0-9]*")
    return min((int(node.name.removeprefix("node")) for node in nodes), default=0)


def _core_of(root: Path, cpu: int) -> str:
    """Return an identifier of the physical core of a logical CPU: the list of its hyperthreads."""
    topology = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
    return _read(topology / "core_cpus_list") or _read(topology / "thread_siblings_list") or str(cpu)


def _host_memory(root: Path) -> int:
    for line in _read(root / "proc/meminfo").splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _cpu_quota(group: Path) -> float | None:
    """Return the CPU time limit of a cgroup in CPUs; None without a limit."""
    quota, _, period = _read(group / "cpu.max").partition(" ")
    if not quota:
        quota, period = _read(group / "cpu.cfs_quota_us"), _read(group / "cpu.cfs_period_us")
    if not quota.isdigit() or not period.isdigit() or not int(period):  # "max" and -1 mean no limit
        return None
    return int(quota) / int(period)


def _page_cache(group: Path) -> int:
    """Return the bytes of page cache charged to a cgroup."""
    values = dict(line.split(" ", 1) for line in _read(group / "memory.stat").splitlines() if " " in line)
    # In version 1, only the names with "total_" include the groups below.
    return sum(int(values.get(f"total_{name}", values.get(name, 0))) for name in _PAGE_CACHE)


def _cgroups(root: Path, controller: str) -> Iterator[Path]:
    """Yield the directories of the process's cgroups with `controller`, from its own up to the root of the mount."""
    for line in _read(root / "proc/self/cgroup").splitlines():
        hierarchy, controllers, path = line.split(":", 2)
        is_v2 = hierarchy == "0" and not controllers
        if not is_v2 and controller not in controllers.split(","):
            continue
        for mount_root, mount_point in _cgroup_mounts(root, None if is_v2 else controller):
            # A mount can show only a part of the hierarchy; in a container, often only its own group.
            relative = os.path.relpath(path, mount_root)
            if relative.startswith(".."):
                relative = "."
            top = root / mount_point.lstrip("/")
            group = top / relative
            yield group
            while group != top:
                group = group.parent
                yield group


def _cgroup_mounts(root: Path, controller: str | None) -> Iterator[tuple[str, str]]:
    """Yield (root of the mounted hierarchy, mount point) of cgroup v2, or of a controller of v1."""
    for line in _read(root / "proc/self/mountinfo").splitlines():
        fields, _, source = line.partition(" - ")
        kind, _, options = source.partition(" ")
        _, _, _, mount_root, mount_point, *_ = fields.split(" ")
        if kind == "cgroup2" if controller is None else kind == "cgroup" and controller in _words(options):
            yield mount_root, mount_point


def _words(options: str) -> list[str]:
    return options.rpartition(" ")[2].split(",")


def _read(path: Path) -> str:
    """Return the contents of a file; "" if it cannot be read."""
    try:
        return path.read_text().strip()
    except (OSError, ValueError):
        return ""


def _read_int(*paths: Path) -> int | None:
    """Return the number in the first file that exists; None for "max" or if no file exists."""
    text = next((text for path in paths if (text := _read(path))), "")
    return int(text) if text.isdigit() else None

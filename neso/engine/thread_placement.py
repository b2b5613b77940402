"""Threads of a CPU runner, and where they run: one per physical core, on the NUMA nodes that have their weights.

Weights are read once per step, so a machine with several NUMA nodes is fast only if each thread reads memory of its own
node. Threads are numbered in the order of the nodes, each has a fixed part of every matrix, and allocates it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from neso.engine.host_resources import ROOT, Core, available_cores, format_cpu_list, physical_cores

ThreadBinding = Literal["auto", "core", "node", "none"]


class BindingError(ValueError):
    """There are not enough cores for the threads."""


@dataclass(frozen=True, slots=True)
class ThreadPlacement:
    """- count: number of threads, at least 1
    - cpus: the logical CPUs that each thread is bound to; empty: threads are not bound
    - nodes: NUMA nodes that the threads are distributed to, in order; empty if there is one, or threads are not bound
    """

    count: int
    cpus: list[list[int]]
    nodes: list[int]

    def describe(self) -> str:
        """Return a description for logs: "8 threads, one per core on CPUs 0-7 of 2 NUMA nodes"."""
        text = f"{self.count} thread{'s' if self.count > 1 else ''}"
        if not self.cpus:
            return f"{text}, not bound to CPUs"
        distinct = {tuple(cpus) for cpus in self.cpus}
        text += ", one per core" if len(distinct) == self.count else ", bound to NUMA nodes"
        text += f" on CPUs {format_cpu_list({cpu for cpus in self.cpus for cpu in cpus})}"
        return f"{text} of {len(self.nodes)} NUMA nodes" if self.nodes else text


def place_threads(
    num_threads: int | None = None,
    binding: ThreadBinding = "auto",
    root: Path = ROOT,
    cpus: Iterable[int] | None = None,
) -> ThreadPlacement:
    """Place the threads of an engine on the CPUs of this process, or on `cpus`.

    - num_threads: None: as many as physical cores within the CPU quota, see `available_cores`
    - binding: "core": each thread to the hyperthreads of a core of its own; "node": to the CPUs of a NUMA node; "none";
      "auto": "node" if there are several nodes, otherwise "none", since other processes may use the cores as well

    Raises `BindingError` for "core" with more threads than cores.
    """
    cores = physical_cores(root, cpus)
    count = num_threads or available_cores(root, cpus)
    nodes = sorted({core.node for core in cores})
    if binding == "auto":
        binding = "node" if len(nodes) > 1 else "none"
    if binding == "none":
        return ThreadPlacement(count, [], [])
    if binding == "core" and count > len(cores):
        raise BindingError(
            f"thread_binding: core needs a core for each thread, but {count} threads have {len(cores)}"
        )
    # With fewer threads than cores, they are spread evenly over the cores, and so over the nodes.
    own = [cores[thread * len(cores) // count] for thread in range(count)]
    bound = [core.cpus if binding == "core" else _cpus_of(core.node, cores) for core in own]
    used = sorted({core.node for core in own})
    return ThreadPlacement(count, bound, used if len(used) > 1 else [])


def _cpus_of(node: int, cores: list[Core]) -> list[int]:
    return sorted(cpu for core in cores if core.node == node for cpu in core.cpus)

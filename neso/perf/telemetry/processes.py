"""CPU and memory use of the server's processes, if the server runs on this machine, and GPU use of this machine.

Linux only for processes; GPUs need nvidia-ml-py (`pip install neso-server[torch]`).
"""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_PROC = Path("/proc")
_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")
_LISTEN = "0A"


@dataclass(frozen=True, slots=True)
class Use:
    """CPU seconds used so far and resident bytes, of all processes together."""

    cpu_seconds: float
    resident_bytes: float


def is_local(host: str) -> bool:
    """Return True if a host name or address is one of this machine's."""
    try:
        addresses = {info[4][0] for info in socket.getaddrinfo(host, None)}
    except OSError:
        return False
    for address in addresses:
        if ipaddress.ip_address(str(address).split("%")[0]).is_loopback:
            return True
        family = socket.AF_INET6 if ":" in str(address) else socket.AF_INET
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.bind((str(address), 0))  # only an address of this machine can be bound
            return True
        except OSError:
            continue
    return False


def listening_process(port: int) -> int | None:
    """Return the id of the process that listens on a TCP port; None if it is unknown or not ours to see."""
    inodes = set(_listening_inodes(port))
    if not inodes:
        return None
    for directory in _PROC.iterdir():
        if directory.name.isdigit():
            try:
                for link in (directory / "fd").iterdir():
                    if os.readlink(link) in inodes:
                        return int(directory.name)
            except OSError:
                continue
    return None


def _listening_inodes(port: int) -> Iterator[str]:
    for table in ("tcp", "tcp6"):
        try:
            lines = (_PROC / "net" / table).read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            parts = line.split()
            if parts[3] == _LISTEN and int(parts[1].rsplit(":", 1)[1], 16) == port:
                yield f"socket:[{parts[9]}]"


def process_tree(root: int) -> list[int]:
    """Return a process and its descendants."""
    children: dict[int, list[int]] = {}
    for directory in _PROC.iterdir():
        if directory.name.isdigit() and (stat := _stat(int(directory.name))):
            children.setdefault(int(stat[1]), []).append(int(directory.name))
    found, waiting = [], [root]
    while waiting:
        process = waiting.pop()
        found.append(process)
        waiting += children.get(process, [])
    return found


def use_of(processes: list[int]) -> Use:
    """Return the use of processes; those that have ended do not count."""
    cpu, resident = 0.0, 0.0
    for process in processes:
        if stat := _stat(process):
            cpu += (int(stat[11]) + int(stat[12])) / _TICKS
            resident += int(stat[21]) * _PAGE
    return Use(cpu, resident)


def _stat(process: int) -> list[str] | None:
    """Return the fields of /proc/PID/stat after the name: state, parent, …"""
    try:
        text = (_PROC / str(process) / "stat").read_text()
    except OSError:
        return None
    return text[text.rindex(")") + 2 :].split()


class Gpus:
    """Resource use of the GPUs of this machine. Empty without nvidia-ml-py or a driver."""

    def __init__(self) -> None:
        self._handles: list[Any] = []
        self._library: Any = None
        try:
            import pynvml

            pynvml.nvmlInit()
            self._handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
            self._library = pynvml
        except Exception:  # not installed, no driver, or no permission: pynvml raises its own classes
            self._handles = []

    def read(self) -> list[tuple[str, str, str, float]]:
        """Return group, unit, name and value of each reading."""
        found = []
        for index, handle in enumerate(self._handles):
            name = f"GPU {index}"
            try:
                memory = self._library.nvmlDeviceGetMemoryInfo(handle).used / 2**30
                busy = self._library.nvmlDeviceGetUtilizationRates(handle).gpu
                found += [
                    ("GPU use", "%", name, float(busy)),
                    ("GPU memory", "GiB", name, float(memory)),
                    ("GPU power", "W", name, self._library.nvmlDeviceGetPowerUsage(handle) / 1000),
                ]
            except self._library.NVMLError:
                continue
        return found

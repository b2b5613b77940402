"""Two hosts: network namespaces with a virtual cable between them, and own host names."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ADDRESSES = ("10.213.7.1", "10.213.7.2")

_ENTER = """#!/bin/sh
# mpiexec calls this instead of ssh: [OPTIONS] HOST COMMAND...
while [ "${1#-}" != "$1" ]; do shift; done
host=$1; shift
exec ip netns exec "neso-$host-%(pid)s" unshare --uts sh -c "hostname host-$host; exec $*"
"""


class TwoHosts:
    """Creates the namespaces; `close` removes them. `launcher`: a program to use in place of ssh."""

    def __init__(self, folder: Path) -> None:
        self.names = [f"neso-{address}-{os.getpid()}" for address in ADDRESSES]
        self.launcher = folder / "enter"
        self.launcher.write_text(_ENTER % {"pid": os.getpid()})
        self.launcher.chmod(0o755)
        ends = [f"nv{os.getpid() % 100000}{letter}" for letter in "ab"]
        try:
            for name in self.names:
                _run("ip", "netns", "add", name)
            _run("ip", "link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
            for name, end, address in zip(self.names, ends, ADDRESSES, strict=True):
                _run("ip", "link", "set", end, "netns", name)
                inside = ("ip", "-n", name)
                _run(*inside, "address", "add", f"{address}/24", "dev", end)
                _run(*inside, "link", "set", end, "up")
                _run(*inside, "link", "set", "lo", "up")
        except subprocess.CalledProcessError:
            self.close()
            raise

    def close(self) -> None:
        for name in self.names:
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


def _missing() -> str:
    if shutil.which("ip") is None or shutil.which("unshare") is None:
        return "ip or unshare is missing: apt-get install iproute2 util-linux"
    name = f"neso-probe-{os.getpid()}"
    if subprocess.run(["ip", "netns", "add", name], check=False, capture_output=True).returncode:
        return "network namespaces are not permitted here"
    subprocess.run(["ip", "netns", "delete", name], check=False)
    return ""


def require_two_hosts() -> None:
    """Skip the test if network namespaces cannot be created."""
    if reason := _missing():
        pytest.skip(reason)

"""An engine in a memory cgroup of 320 MB is not killed, and threads follow the cpuset and the CPU quota.

Uses real cgroups (v1 or v2) and is skipped where it may not create one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

MiB = 1 << 20
LIMIT = 320 * MiB
MOUNT = Path("/sys/fs/cgroup")

# Prints the sizes that an engine chooses, fills its cache, and prints the number of tokens.
ENGINE = """
import json
from neso.engine.host_resources import available_cores, available_memory
memory = available_memory()
import neso
from neso.generation import SamplingParams
llm = neso.LLM("neso-pilot", max_num_seqs=2048, max_num_batched_tokens=2048)
pool = llm.core.scheduler.kv.pool
params = SamplingParams(max_tokens=64, ignore_eos=True, temperature=0)
num_tokens, number = 0, 0
while llm.core.stats().prefix_evicted_blocks == 0 and number < 400:
    prompts = [[(number * 97 + i * 31 + j) % 200 + 5 for j in range(900)] for i in range(8)]
    number += 8
    for result in llm.generate(prompts, params, progress=False):
        num_tokens += len(result.outputs[0].token_ids)
peak = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(json.dumps({
    "memory": memory, "blocks": pool.num_blocks, "tokens": num_tokens, "cores": available_cores(),
    "evicted": llm.core.stats().prefix_evicted_blocks, "peak_mib": int(peak.split()[1]) // 1024,
}))
"""
# Fills the page cache of the group with a file, and prints what is available before and after.
PAGE_CACHE = """
import json, sys
from neso.engine.host_resources import available_memory
before = available_memory()
with open(sys.argv[1], "wb") as file:
    for _ in range(160):
        file.write(bytes(1 << 20))
    file.flush()
    import os
    os.fsync(file.fileno())
with open(sys.argv[1], "rb") as file:
    while file.read(1 << 20):
        pass
print(json.dumps({"before": before, "after": available_memory()}))
"""


class Group:
    """A cgroup of one controller; removed by `close`."""

    def __init__(self, controller: str, settings: dict[str, object]) -> None:
        v1 = MOUNT / controller
        self._folder = (v1 if v1.is_dir() else MOUNT) / f"neso-test-{uuid.uuid4().hex[:8]}"
        try:
            if not v1.is_dir():
                (MOUNT / "cgroup.subtree_control").write_text(f"+{controller}")
            self._folder.mkdir()
        except OSError as error:
            pytest.skip(f"cannot create a cgroup: {error}")
        self.version = 1 if v1.is_dir() else 2
        for name, value in settings.items():
            if name.startswith(f"v{self.version}:"):
                try:
                    (self._folder / name[3:]).write_text(str(value))
                except OSError as error:
                    self.close()
                    pytest.skip(f"cannot set {name}: {error}")

    def close(self) -> None:
        self._folder.rmdir()

    def enter(self) -> None:
        """Move the calling process into the group."""
        (self._folder / "cgroup.procs").write_text(str(os.getpid()))

    def kills(self) -> int:
        """Return how often the kernel has killed a process of the group."""
        file = "memory.oom_control" if self.version == 1 else "memory.events"
        fields = dict(line.split() for line in (self._folder / file).read_text().splitlines())
        return int(fields.get("oom_kill", 0))


@pytest.fixture
def memory_group() -> Iterator[Group]:
    limits = {
        "v1:memory.limit_in_bytes": LIMIT,
        "v2:memory.max": LIMIT,
        "v2:memory.swap.max": 0,
    }
    group = Group("memory", limits)
    yield group
    group.close()


def run_in(groups: list[Group], code: str, *arguments: object) -> dict[str, int]:
    """Run Python code in a process of the groups and return the JSON that it prints."""

    def enter() -> None:
        for group in groups:
            group.enter()

    result = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        preexec_fn=enter,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert result.returncode == 0, f"exit status {result.returncode}: {result.stderr[-2000:]}"
    printed: dict[str, int] = json.loads(result.stdout.splitlines()[-1])
    return printed


def test_engine_with_a_full_cache_stays_within_the_limit(memory_group):
    found = run_in([memory_group], ENGINE)
    print(f"cgroup v{memory_group.version} of {LIMIT // MiB} MiB: {found}")
    assert found["memory"] <= LIMIT
    assert found["tokens"] > 0 and memory_group.kills() == 0


def test_page_cache_is_not_counted_as_used(memory_group, tmp_path):
    found = run_in([memory_group], PAGE_CACHE, tmp_path / "file")
    print({name: value // MiB for name, value in found.items()})
    assert found["before"] > LIMIT // 2
    assert found["before"] - found["after"] < 48 * MiB, "160 MiB of page cache were written"


def test_threads_follow_cpuset_and_quota():
    code = "import json; from neso.engine.host_resources import available_cores as n; print(json.dumps({'n': n()}))"
    free = run_in([], code)["n"]
    if free < 2:
        pytest.skip("needs two cores")
    quota = Group(
        "cpu",
        {"v1:cpu.cfs_period_us": 100_000, "v1:cpu.cfs_quota_us": 100_000, "v2:cpu.max": "100000 100000"},
    )
    try:
        assert run_in([quota], code)["n"] == 1
    finally:
        quota.close()
    cpuset = Group(
        "cpuset",
        {"v1:cpuset.cpus": 0, "v1:cpuset.mems": 0, "v2:cpuset.cpus": 0},
    )
    try:
        assert run_in([cpuset], code)["n"] == 1
    finally:
        cpuset.close()

"""Two prefill and two decode workers in real processes give the results of one engine, whatever is lost."""

from __future__ import annotations

import asyncio
import random
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from eventually import until

sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))

from checkpoints import make_checkpoint
from request_mix import Answer, AnyRequest, Files

from neso.cluster import router
from neso.cluster.cluster_engine import ClusterEngine
from neso.engine.config import EngineConfig
from neso.engine.errors import EngineError
from neso.generation import GenerationRequest, InvalidParameter, PoolingRequest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SMALL: dict[str, Any] = {
    "runner": "native",
    "num_blocks": 60,  # so few that requests preempt each other
    "block_size": 4,
    "max_prefill_chunk": 7,
    "num_threads": 1,
    "prefill_workers": 2,
    "decode_workers": 2,
    "min_remote_prefill": 8,
}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    same = make_checkpoint(tmp_path_factory.mktemp("llama"), "llama")
    return Files(tmp_path_factory.mktemp("adapters"), same, same)


class Cluster:
    """The engine on workers, which are started again when they end."""

    def __init__(self, engine: ClusterEngine, files: Files) -> None:
        self.engine, self.files = engine, files
        self._restarts: set[asyncio.Task[Any]] = set()
        engine.local.on_dead(self._restart)

    def _restart(self, number: int, reason: str) -> None:
        self._restarts.add(asyncio.create_task(self.engine.local.restart(number)))

    @property
    def counters(self) -> Any:
        return self.engine.cluster.counters

    def processes(self, name: str) -> list[psutil.Process]:
        """Return the process of a worker, and that of its engine."""
        for child in psutil.Process().children():
            if f'"name":"{name}"' in child.cmdline()[-1]:
                return [child, *child.children()]
        raise AssertionError(f"worker '{name}' does not run")

    async def run(self, name: str, request: AnyRequest, outputs: list[str] | None = None) -> Answer:
        """Return the results of a request; each output appends to `outputs`."""
        answer = Answer()
        try:
            if isinstance(request, PoolingRequest):
                answer.take(await self.engine.pool(request))
                return answer
            async for output in self.engine.generate(request):
                answer.take(output)
                if outputs is not None:
                    outputs.append(name)
        except (EngineError, InvalidParameter) as error:
            answer.error = str(error)
        return answer

    async def compare(self, names: Sequence[str], outputs: list[str] | None = None) -> None:
        """Run requests of the catalogue at the same time, and compare with one engine that runs each alone."""
        requests = self.files.catalogue()
        answers = await asyncio.gather(*(self.run(name, requests[name], outputs) for name in names))
        for name, answer in zip(names, answers, strict=True):
            answer.assert_equal(self.files.alone(name, "native", False), name)

    async def complete(self) -> None:
        """Wait until all workers run and nothing is left of the requests."""
        workers = self.engine.cluster
        await until(lambda: len(workers.workers) == 4, 120)
        await until(lambda: not any(one.exports or one.num_sequences for one in workers.workers), 120)
        stats = await self.engine.check_integrity()
        assert not workers.queue.jobs and stats.num_requests == 0

    async def close(self) -> None:
        await asyncio.gather(*self._restarts)
        await self.engine.stop()


@asynccontextmanager
async def running(files: Files, **options: Any) -> AsyncIterator[Cluster]:
    config = EngineConfig.from_options(str(files.same), files.engine_options({**SMALL, **options}))
    cluster = Cluster(await ClusterEngine.open(config), files)
    try:
        yield cluster
    finally:
        await cluster.close()


async def test_every_feature_gives_the_results_of_one_engine(files: Files):
    requests = files.catalogue()
    names = [name for name in requests if not name.startswith("pooling") or "+lora" not in name]
    random.Random(1).shuffle(names)
    async with running(files) as cluster:
        for start in range(0, len(names), 40):
            await cluster.compare(names[start : start + 40])
        assert cluster.counters.remote_prefills > 10
        assert cluster.counters.imported_tokens > 0
        hits = cluster.engine.cluster.stats().prefix_hit_tokens
        await cluster.compare(names[:20])  # the prompts are cached now
        assert cluster.engine.cluster.stats().prefix_hit_tokens > hits
        await cluster.complete()


async def test_prompts_computed_where_they_cost_less_give_the_results_of_one_engine(
    files: Files, monkeypatch: pytest.MonkeyPatch
):
    """Prompts are remote until their times are measured, and then by these times."""
    monkeypatch.setattr(router, "UNMEASURED_REMOTE_PREFILL", 8)
    names = [name for name in files.catalogue() if not name.startswith("pooling")]
    random.Random(3).shuffle(names)
    async with running(files, min_remote_prefill=None) as cluster:
        for start in range(0, 40, 20):
            await cluster.compare(names[start : start + 20])
        counters = cluster.counters
        assert 0 < counters.remote_prefills < counters.grants
        await cluster.complete()


LOSSES = [
    # worker, whether its engine process, signal, number of outputs before it
    ("prefill-0", False, signal.SIGKILL, 0),
    ("prefill-1", True, signal.SIGSTOP, 3),
    ("decode-2", False, signal.SIGKILL, 1),
    ("decode-3", False, signal.SIGSTOP, 20),
    ("prefill-0", True, signal.SIGKILL, 8),
    ("decode-3", True, signal.SIGKILL, 5),
]


async def test_every_request_ends_once_with_its_tokens_if_processes_are_lost(files: Files):
    requests = files.catalogue()
    names = [name for name in requests if isinstance(requests[name], GenerationRequest)]
    async with running(files, heartbeat_timeout=6.0, max_attempts=20) as cluster:
        for number, (worker, of_engine, which, count) in enumerate(LOSSES):
            chosen = random.Random(number).sample(names, 16)
            outputs: list[str] = []
            lost = cluster.counters.lost_workers
            comparing = asyncio.create_task(cluster.compare(chosen, outputs))
            await until(lambda count=count, outputs=outputs: len(outputs) >= count, 120)
            cluster.processes(worker)[of_engine].send_signal(which)
            await comparing
            await until(lambda lost=lost: cluster.counters.lost_workers > lost, 120)
            await cluster.complete()
        assert cluster.counters.failed == 0

"""Two prefill and two decode workers in real processes give the results of one engine."""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from eventually import until

sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))

from checkpoints import make_checkpoint
from request_mix import Answer, AnyRequest, Files, with_prompt

from neso.cluster.cluster_engine import ClusterEngine
from neso.engine.config import EngineConfig
from neso.engine.errors import EngineError
from neso.generation import InvalidParameter, LoraRequest, PoolingRequest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

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
    """The engine on workers."""

    def __init__(self, engine: ClusterEngine, files: Files) -> None:
        self.engine, self.files = engine, files

    @property
    def counters(self) -> Any:
        return self.engine.cluster.counters

    async def run(self, request: AnyRequest) -> Answer:
        """Return the results of a request."""
        answer = Answer()
        try:
            if isinstance(request, PoolingRequest):
                answer.take(await self.engine.pool(request))
                return answer
            async for output in self.engine.generate(request):
                answer.take(output)
        except (EngineError, InvalidParameter) as error:
            answer.error = str(error)
        return answer

    async def compare(self, names: Sequence[str]) -> None:
        """Run requests of the catalogue at the same time, and compare with one engine that runs each alone."""
        requests = self.files.catalogue()
        answers = await asyncio.gather(*(self.run(requests[name]) for name in names))
        for name, answer in zip(names, answers, strict=True):
            answer.assert_equal(self.files.alone(name, "native", False), name)

    async def complete(self) -> None:
        """Wait until all workers run and nothing is left of the requests."""
        workers = self.engine.cluster
        await until(lambda: len(workers.workers) == 4, 60)
        await until(lambda: not any(one.exports or one.num_sequences for one in workers.workers), 60)
        stats = await self.engine.check_integrity()
        assert not workers.queue.jobs and stats.num_requests == 0

    async def close(self) -> None:
        await self.engine.stop()


@asynccontextmanager
async def running(files: Files) -> AsyncIterator[Cluster]:
    config = EngineConfig.from_options(str(files.same), files.engine_options(SMALL))
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
        refused = with_prompt("short", {}, lora=LoraRequest(name="c", path=files.adapters["a"]))
        answer = await cluster.run(refused)
        assert "adapters in a request are not supported with workers" in answer.error

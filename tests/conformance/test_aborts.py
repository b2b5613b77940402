"""Disconnecting clients: other clients get their exact tokens, and all blocks are freed."""

from __future__ import annotations

import asyncio
import random
import re
import time

import openai
import psutil
import pytest
from eventually import wait_until
from server_process import ServerProcess
from step_pace import slow_children

from neso.engine.client.async_engine import AsyncEngine
from neso.engine.config import EngineConfig
from neso.engine.errors import EngineDead
from neso.generation import GenerationRequest, SamplingParams
from neso.models import SHIPPED_MODELS

MODEL = "neso-pilot"
PILOT = SHIPPED_MODELS[MODEL]
STREAMS = 100


def prompt(i: int) -> str:
    return f"What is in-flight batching? ({i})"


@pytest.mark.slow
def test_fifty_of_a_hundred_streams_disconnect(llm):
    """Over the network, with a cache that holds only some of the requests."""
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    expected = llm.generate([prompt(i) for i in range(STREAMS)], params, progress=False)
    with ServerProcess("--max-num-seqs=32", "--kv-cache-memory=6000000") as server:
        rng = random.Random(0)
        doomed = set(rng.sample(range(STREAMS), STREAMS // 2))

        async def one(client: openai.AsyncOpenAI, i: int) -> str:
            await asyncio.sleep(rng.random() * 0.5)
            stream = await client.completions.create(
                model=MODEL,
                prompt=prompt(i),
                max_tokens=40 if i not in doomed else 1500,
                temperature=0,
                stream=True,
                extra_body={"ignore_eos": True},
            )
            text, leave_after = "", rng.randrange(1, 30)
            async for chunk in stream:
                text += chunk.choices[0].text
                leave_after -= 1
                if i in doomed and leave_after == 0:
                    await stream.close()
                    break
            return text

        async def run() -> list[str]:
            async with openai.AsyncOpenAI(
                base_url=server.url("/v1", "openai"), api_key="none", timeout=120
            ) as client:
                return await asyncio.gather(*(one(client, i) for i in range(STREAMS)))

        texts = asyncio.run(run())
        for i in set(range(STREAMS)) - doomed:
            assert texts[i] == expected[i].text
        wait_until(lambda: server.gauge("vllm:num_requests_running") == 0)
        assert server.gauge("vllm:kv_cache_usage_perc") == 0
        assert server.gauge("vllm:num_requests_waiting") == 0
        _assert_idle(server)


def _assert_idle(server: ServerProcess) -> None:
    """Check that server and engine use no CPU time when idle."""
    processes = [psutil.Process(server.process.pid)]
    processes += processes[0].children(recursive=True)
    assert any(re.search("engine_process", " ".join(p.cmdline())) for p in processes)

    def used() -> float:
        return sum(p.cpu_times().user + p.cpu_times().system for p in processes)

    def idle() -> bool:
        before, started = used(), time.monotonic()
        time.sleep(2)
        return (used() - before) / (time.monotonic() - started) < 0.1

    wait_until(idle)  # they may have to clean up first


async def test_blocks_are_conserved_after_aborts_in_every_state():
    """The same through the engine's IPC channel, with the integrity check of the block pool."""
    config = EngineConfig.from_options(str(PILOT), {"num_blocks": 160, "max_num_seqs": 16})
    engine = await AsyncEngine.start(config)
    rng = random.Random(1)

    async def one(i: int) -> int:
        params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, n=rng.choice([1, 1, 2]))
        generation = engine.generate(GenerationRequest(prompt(i), params))
        leave_after = rng.choice([0, 1, 5, 1000])
        tokens = 0
        async for output in generation:
            tokens += sum(len(delta.token_ids) for delta in output.deltas)
            leave_after -= 1
            if leave_after <= 0:
                break
        await generation.aclose()
        return tokens

    try:
        tasks = [asyncio.create_task(one(i)) for i in range(60)]
        await asyncio.sleep(0.3)
        for task in tasks[::7]:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        stats = await engine.check_integrity()
        assert engine.num_requests == 0
        assert (stats.num_running, stats.num_waiting, stats.num_used_blocks) == (0, 0, 0)
    finally:
        await engine.stop()


async def test_requests_fail_when_the_engine_dies(monkeypatch, tmp_path):
    slow_children(monkeypatch, tmp_path)
    engine = await AsyncEngine.start(EngineConfig.from_options(str(PILOT), {}))
    reasons: list[str] = []
    engine.on_dead(reasons.append)
    generation = engine.generate(GenerationRequest("Hi", SamplingParams(ignore_eos=True, max_tokens=1500)))
    await anext(generation)
    engine._channel.process.kill()  # type: ignore[attr-defined]
    with pytest.raises(EngineDead, match="SIGKILL"):
        async for _ in generation:
            pass
    assert reasons and not engine.alive
    with pytest.raises(EngineDead):
        await anext(engine.generate(GenerationRequest("Hi")))


def _engines(server: ServerProcess) -> list[psutil.Process]:
    children = psutil.Process(server.process.pid).children(recursive=True)
    return [child for child in children if "neso.engine.ipc.engine_process" in child.cmdline()]


def test_engine_crash_affects_only_its_model():
    with ServerProcess("first=neso-pilot", "second=neso-pilot", "--engine-config=max_restarts=0") as server:
        assert len(_engines(server)) == 2
        _engines(server)[0].kill()
        wait_until(lambda: server.get("/v2/health/ready")[0] == 400)
        generate = "/v2/models/{}/generate"
        status = {
            name: server.post(generate.format(name), {"text_input": "Hi", "max_tokens": 2})
            for name in ("first", "second")
        }
        assert sorted(code for code, _ in status.values()) == [200, 503]
        (response,) = (response for code, response in status.values() if code == 503)
        assert "SIGKILL" in response["error"]
        assert server.stop() == 0


def test_engines_exit_when_the_server_is_killed():
    with ServerProcess() as server:
        (engine,) = _engines(server)
        server.process.kill()
        engine.wait(60)

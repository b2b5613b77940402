"""Transfers between two engine processes, and processes that die or stop on the way."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import uuid

import msgspec
import pytest
from eventually import until

from neso.engine.client.async_engine import AsyncEngine
from neso.engine.client.llm import LLM
from neso.engine.client.output_processor import RequestState
from neso.engine.config import EngineConfig
from neso.engine.core.request import KvExport, KvImport
from neso.generation import GenerationOutput, GenerationRequest, SamplingParams
from neso.models import SHIPPED_MODELS

PILOT = SHIPPED_MODELS["neso-pilot"]
PROMPT = "What is TTFT? It is the time to the first token. " * 6
DRAWN = SamplingParams(temperature=0.8, seed=7, max_tokens=20, logprobs=1, ignore_eos=True)
OPTIONS = {"num_blocks": 128, "max_prefill_chunk": 16, "kv_transfer": True, "num_threads": 1}


async def start(**options: object) -> AsyncEngine:
    return await AsyncEngine.start(EngineConfig.from_options(str(PILOT), {**OPTIONS, **options}))


@pytest.fixture(scope="module")
def expected() -> list[int]:
    llm = LLM(PILOT, num_blocks=128, num_threads=1)
    (result,) = llm.generate(PROMPT, DRAWN, progress=False)
    return result.outputs[0].token_ids


@pytest.fixture
async def engines():
    started = await asyncio.gather(start(), start())
    yield started
    for engine in started:
        with contextlib.suppress(ProcessLookupError):
            os.kill(engine._channel.process.pid, signal.SIGCONT)
        await engine.stop()


def submit(engine: AsyncEngine, **changes: object) -> asyncio.Queue[GenerationOutput | Exception]:
    """Submit the request with changed fields; returns the queue of its outputs."""
    request = engine.process(GenerationRequest(PROMPT, DRAWN)).request
    export = changes.pop("kv_export", None)
    request = request.prefill_only(export) if export else msgspec.structs.replace(request, **changes)
    outputs: asyncio.Queue[GenerationOutput | Exception] = asyncio.Queue()
    engine.submit(RequestState(request, engine.text), outputs.put_nowait)
    return outputs


async def tokens_of(outputs: asyncio.Queue[GenerationOutput | Exception]) -> list[int]:
    tokens: list[int] = []
    while True:
        output = await asyncio.wait_for(outputs.get(), 60)
        if isinstance(output, Exception):
            raise output
        tokens += [token for delta in output.deltas for token in delta.token_ids]
        if output.finished:
            return tokens


async def assert_empty(engine: AsyncEngine) -> None:
    await until(lambda: engine.stats.num_used_blocks == 0)
    stats = await engine.check_integrity()
    assert (stats.num_used_blocks, stats.kv_transfer.leases, stats.kv_transfer.active_imports) == (0, 0, 0)


async def test_transfer_between_processes(engines, expected):
    prefill, decode = engines
    transfer_id = uuid.uuid4().hex
    exported = submit(prefill, kv_export=KvExport(transfer_id))
    source = KvImport(prefill.info.kv_address, transfer_id)
    assert await tokens_of(submit(decode, kv_import=source)) == expected
    assert await tokens_of(exported) == []
    stats = decode.stats.kv_transfer
    assert (stats.imports, stats.fallbacks) == (1, 0)
    prompt = decode.process(GenerationRequest(PROMPT, DRAWN)).request.prompt_token_ids
    assert stats.imported_blocks == (len(prompt) - 1) // 16
    for engine in engines:
        await assert_empty(engine)
    # Another engine continues after the tokens that were delivered before the first one died.
    rest = submit(prefill, output_token_ids=expected[:7])
    assert await tokens_of(rest) == expected[7:]


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
async def test_prefill_process_that_ends_or_stops(engines, expected, how):
    prefill, decode = engines
    exported = submit(prefill, kv_export=KvExport("t"))
    assert await tokens_of(exported) == []
    os.kill(prefill._channel.process.pid, how)
    source = KvImport(prefill.info.kv_address, "t", timeout_seconds=0.5)
    assert await tokens_of(submit(decode, kv_import=source)) == expected
    assert decode.stats.kv_transfer.fallbacks == 1
    await assert_empty(decode)
    if how is signal.SIGSTOP:
        os.kill(prefill._channel.process.pid, signal.SIGCONT)
        prefill.release_lease("t")
        await assert_empty(prefill)


async def test_decode_process_that_ends(engines, expected):
    """Another engine imports the blocks that are still held."""
    prefill, decode = engines
    assert await tokens_of(submit(prefill, kv_export=KvExport("t"))) == []
    os.kill(decode._channel.process.pid, signal.SIGKILL)
    await until(lambda: not decode.alive)
    await decode.restart()
    source = KvImport(prefill.info.kv_address, "t")
    tokens = await tokens_of(submit(decode, kv_import=source, output_token_ids=expected[:3]))
    assert tokens == expected[3:]
    assert decode.stats.kv_transfer.imports == 1
    for engine in engines:
        await assert_empty(engine)

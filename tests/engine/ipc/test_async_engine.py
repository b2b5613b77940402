"""AsyncEngine with the engine in a thread and in a process: same tokens as LLM, errors, aborts, shutdown."""

from __future__ import annotations

import asyncio
import json
import logging
import shutil
import threading
from contextlib import aclosing
from typing import Any

import msgspec
import numpy as np
import pytest
from eventually import until
from step_pace import slow_children

from neso.engine.client.async_engine import AsyncEngine
from neso.engine.client.llm import LLM
from neso.engine.config import EngineConfig
from neso.engine.errors import EngineDead, EngineError
from neso.engine.ipc.engine_process import with_load_log
from neso.generation import DraftTokens, FinishReason, GenerationRequest, InvalidParameter, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


async def text_of(engine: AsyncEngine, prompt: str, params: SamplingParams = GREEDY) -> str:
    async with aclosing(engine.generate(GenerationRequest(prompt, params))) as outputs:
        return "".join([delta.text async for output in outputs for delta in output.deltas])


@pytest.fixture(params=["thread", "process"])
async def engine(request, llama_checkpoint):
    config = EngineConfig.from_options(str(llama_checkpoint), {"num_blocks": 64})
    engine = await AsyncEngine.start(config, in_process=request.param == "thread")
    yield engine
    await engine.stop()


@pytest.fixture(params=["thread", "process"])
async def slow_engine(request, llama_checkpoint, step_pace, monkeypatch, tmp_path):
    """An engine with slow steps, so that requests still run when they are aborted or the engine stops."""
    slow_children(monkeypatch, tmp_path)
    config = EngineConfig.from_options(str(llama_checkpoint), {"num_blocks": 64})
    engine = await AsyncEngine.start(config, in_process=request.param == "thread")
    yield engine
    await engine.stop()


async def test_same_text_as_llm(engine, llama_checkpoint):
    prompts = ["The quick", "A server answers", "Voyager"]
    expected = [r.text for r in LLM(llama_checkpoint).generate(prompts, GREEDY, progress=False)]
    assert await asyncio.gather(*(text_of(engine, prompt) for prompt in prompts)) == expected
    stats = await engine.check_integrity()
    assert (stats.num_running, stats.num_used_blocks, engine.num_requests) == (0, 0, 0)


async def test_log_of_an_engine_process_that_loads_is_logged_by_its_client(llama_checkpoint, caplog):
    config = EngineConfig.from_options(str(llama_checkpoint), {"num_blocks": 64, "max_num_seqs": 5})
    with caplog.at_level(logging.INFO, "neso"):
        engine = await AsyncEngine.start(config)
        await engine.stop()
    name = llama_checkpoint.name
    [line] = [line for line in caplog.messages if line.startswith(f"engine of {name}: memory: largest step")]
    assert "max_num_batched_tokens 1024, max_num_seqs 5" in line


def test_warnings_of_loading_are_not_held_back(monkeypatch):
    shown: list[str] = []
    monkeypatch.setattr(logging.lastResort, "emit", lambda record: shown.append(record.getMessage()))

    def load() -> Any:
        logging.getLogger("neso.engine").info("started with %d", 3)
        logging.getLogger("neso.engine").warning("slow")
        raise EngineError("too large")

    with pytest.raises(EngineError):
        with_load_log(load)
    assert shown == ["slow"]


async def test_closing_or_cancelling_a_stream_aborts(slow_engine):
    engine = slow_engine
    params = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)
    generation = engine.generate(GenerationRequest("The quick", params))
    await anext(generation)
    await generation.aclose()
    stats = await engine.check_integrity()
    assert (stats.num_running, stats.num_used_blocks) == (0, 0)
    task = asyncio.create_task(text_of(engine, "A server", params))
    await until(lambda: engine.stats.num_running)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (await engine.check_integrity()).num_used_blocks == 0


async def test_stop_string_frees_the_sequence_in_the_engine(engine):
    free = await text_of(engine, "The quick")
    stop = free[3:5]
    params = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True, stop=(stop,))
    assert await text_of(engine, "The quick", params) == free[: free.index(stop)]
    assert (await engine.check_integrity()).num_used_blocks == 0


async def test_sequences_of_a_request_finish_independently(engine):
    params = SamplingParams(n=3, temperature=1.5, seed=2, max_tokens=20, ignore_eos=True, stop=("e",))
    texts, reasons = ["", "", ""], {}
    async for output in engine.generate(GenerationRequest("The quick", params)):
        for delta in output.deltas:
            assert delta.index not in reasons, "nothing after the end of a sequence"
            texts[delta.index] += delta.text
            if delta.finish_reason:
                reasons[delta.index] = delta.finish_reason
    assert set(reasons) == {0, 1, 2} and set(reasons.values()) <= {FinishReason.STOP, FinishReason.LENGTH}
    assert all("e" not in text for text in texts)


async def test_beams_and_logits_equal_those_of_llm(engine, llama_checkpoint):
    params = SamplingParams(
        beam_width=3, n=2, max_tokens=6, return_context_logits=True, return_generation_logits=True, logprobs=1
    )
    (expected,) = LLM(llama_checkpoint).generate("The quick", params, progress=False)
    (output,) = [o async for o in engine.generate(GenerationRequest("The quick", params))]
    np.testing.assert_array_equal(output.context_logits, expected.context_logits)
    for delta, whole in zip(output.deltas, expected.outputs, strict=True):
        assert (delta.text, delta.cumulative_logprob) == (whole.text, whole.cumulative_logprob)
        assert delta.logprobs == whole.logprobs
        np.testing.assert_array_equal(delta.generation_logits, whole.generation_logits)
    assert (await engine.check_integrity()).num_used_blocks == 0


async def test_cancelling_a_beam_search_frees_its_blocks(slow_engine):
    engine = slow_engine
    params = SamplingParams(beam_width=4, n=4, max_tokens=200, ignore_eos=True)
    task = asyncio.create_task(text_of(engine, "The quick", params))
    await until(lambda: engine.stats.num_running >= 4)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    stats = await engine.check_integrity()
    assert (stats.num_running, stats.num_used_blocks, engine.num_requests) == (0, 0, 0)


async def test_invalid_requests_are_rejected_before_the_engine(engine):
    with pytest.raises(InvalidParameter, match="context is 512 tokens"):
        await text_of(engine, "word " * 2000)
    params = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)
    request = GenerationRequest("The quick", params, request_id="same")
    first = engine.generate(request)
    await anext(first)
    with pytest.raises(InvalidParameter, match="in flight"):
        await anext(engine.generate(request))
    await first.aclose()


async def test_too_many_sequences_are_rejected(engine):
    params = SamplingParams(n=100, max_tokens=2)
    with pytest.raises(InvalidParameter, match="at most 64 sequences"):
        await text_of(engine, "The quick", params)


async def test_stopping_fails_requests_in_flight(slow_engine):
    engine = slow_engine
    params = SamplingParams(max_tokens=400, ignore_eos=True)
    generation = engine.generate(GenerationRequest("The quick", params))
    await anext(generation)
    await engine.stop()
    with pytest.raises(EngineDead):
        async for _ in generation:
            pass
    with pytest.raises(EngineDead):
        await text_of(engine, "The quick")


@pytest.mark.parametrize("in_process", [True, False])
async def test_load_failure_is_reported(llama_checkpoint, tmp_path, in_process):
    broken = shutil.copytree(llama_checkpoint, tmp_path / "broken")
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 7}))
    with pytest.raises(EngineError, match=r"layers\.3"):
        await AsyncEngine.start(EngineConfig(model=str(broken)), in_process=in_process)


async def test_slow_inputs_are_processed_in_a_thread(llama_checkpoint, monkeypatch):
    config = EngineConfig.from_options(str(llama_checkpoint), {"num_blocks": 64})
    engine = await AsyncEngine.start(config, in_process=True)
    threads = []

    def refuse(request):
        threads.append(threading.current_thread())
        raise InvalidParameter("prompt", "was seen")

    monkeypatch.setattr(engine._input, "process", refuse)

    async def reader(prompt: str | list[int] = "x", sampling: SamplingParams = GREEDY, **fields):
        with pytest.raises(InvalidParameter):
            await anext(engine.generate(GenerationRequest(prompt, sampling, **fields)))
        return threads.pop()

    rows = np.zeros((2, 4), np.float32)
    try:
        for inputs in (
            {"prompt": "x" * 8193},
            {"prompt": [5] * 8193},
            {"prompt_embeds": rows},
            {"prompt_embedding_table": rows},
            {"images": (b"",)},
            {"draft": DraftTokens([5], rows[:1])},
            {"sampling": SamplingParams(bad_words=("x",))},
            {"sampling": SamplingParams(stop_words=((5,),))},
            {"sampling": SamplingParams(embedding_bias=bytes(4))},
            {"sampling": SamplingParams(logit_bias=dict.fromkeys(range(8193), 1.0))},
            {"sampling": SamplingParams(allowed_token_ids=tuple(range(8193)))},
        ):
            assert await reader(**inputs) is not threading.main_thread(), inputs.keys()
        assert await reader() is threading.main_thread(), "a switch of threads is not free"
    finally:
        await engine.stop()


async def test_an_unsendable_request_does_not_affect_others(engine, monkeypatch):
    """Commands of one event-loop iteration are sent as one message; an invalid one must not drop the others."""
    others = asyncio.gather(*(text_of(engine, "The quick") for _ in range(3)))
    # Parameter validation has accepted it.
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    monkeypatch.setattr(engine._input, "process", lambda request: _with(process(request), request))
    process = type(engine._input).process.__get__(engine._input)

    def _with(prepared, request):
        salt = ("\ud800",) if request.request_id == "text" else prepared.cache_identity
        priority = 10**30 if request.request_id == "number" else 0
        return msgspec.structs.replace(prepared, cache_identity=salt, priority=priority)

    for name in ("text", "number"):
        with pytest.raises(InvalidParameter, match="cannot be sent"):
            await anext(engine.generate(GenerationRequest("x", params, request_id=name)))
    assert len(set(await others)) == 1
    assert engine.num_requests == 0
    assert (await engine.check_integrity()).num_used_blocks == 0

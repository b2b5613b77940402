"""Invalid, huge and endless grammars among valid requests: only their own requests fail, and the engine continues."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from neso.engine.client.async_engine import AsyncEngine
from neso.engine.client.llm import LLM
from neso.engine.config import EngineConfig
from neso.engine.guided.grammar_sandbox import GrammarSandbox
from neso.engine.guided.token_table import TokenTable
from neso.generation import GenerationRequest, GuidedDecoding, InvalidParameter, SamplingParams

TIMEOUT = 2.0
FREE = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
CHOICE = SamplingParams(temperature=1.0, guided_decoding=GuidedDecoding(choice=("yes", "no")))


def chain(length: int) -> dict[str, Any]:
    """Return definitions that each need the next one: compiling them overflows the stack."""
    inner = {
        f"d{i}": {"type": "object", "properties": {"a": {"$ref": f"#/$defs/d{i + 1}"}}} for i in range(length)
    }
    return {"$ref": "#/$defs/d0", "$defs": {**inner, f"d{length}": {"type": "string"}}}


BOMBS: dict[str, dict[str, Any]] = {
    "many alternatives": {"grammar": "start: " + " | ".join(f'"w{i}"' for i in range(60_000))},
    "a long sequence": {"grammar": "start: " + " ".join(f'"{i}"?' for i in range(60_000))},
    "a large multiple": {"json": {"type": "integer", "multipleOf": 999_983}},
    "a chain of references": {"json": chain(20_000)},
    "a chain of rules": {
        "grammar": "start: r0\n"
        + "\n".join(f'r{i}: r{i + 1} "x" | "y"' for i in range(20_000))
        + '\nr20000: "z"'
    },
    "doubling terminals": {
        "grammar": "start: T0\n" + "\n".join(f"T{i}: T{i + 1} T{i + 1}" for i in range(40)) + '\nT40: "z"'
    },
    "deep parentheses": {"grammar": "start: " + "(" * 50_000 + '"a"' + ")" * 50_000},
    "deep objects": {"json": '{"items":' * 500 + "{}" + "}" * 500},
    "all of any of": {
        "json": {
            "allOf": [
                {
                    "anyOf": [
                        {"type": "object", "properties": {f"p{i}_{j}": {"type": "string"}}} for j in range(6)
                    ]
                }
                for i in range(12)
            ]
        }
    },
    "a huge text": {"regex": "a" * 2_000_000},
    "no end": {"json": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}},
}
HARMLESS: dict[str, dict[str, Any]] = {
    "nested repetition": {"regex": "(a{1000}){1000}"},
    "exponential automaton": {"regex": "(a|b)*a(a|b){30}"},
    "deep arrays": {
        "json": {"type": "array", "maxItems": 9999, "items": {"type": "array", "maxItems": 9999, "items": {}}}
    },
    "a long string": {"json": {"type": "string", "maxLength": 1_000_000}},
    "ambiguous rules": {"grammar": 'start: a\na: a a | "a" | '},
    "doubling rules": {
        "grammar": "start: r0\n" + "\n".join(f"r{i}: r{i + 1} r{i + 1}" for i in range(40)) + '\nr40: "z"'
    },
}


@pytest.fixture(scope="module")
def llm(llama_checkpoint: Path) -> LLM:
    return LLM(llama_checkpoint, num_threads=1, grammar_timeout=TIMEOUT)


@pytest.fixture(scope="module")
def slow_grammar_llm(llama_checkpoint: Path) -> LLM:
    """An engine with a long grammar timeout, for grammars that compile in time on any machine."""
    return LLM(llama_checkpoint, num_threads=1, grammar_timeout=60)


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_fails_only_its_request(llm: LLM, name: str) -> None:
    expected = llm.generate("The quick", FREE, progress=False)[0].text
    stream = llm.stream(
        "The quick", SamplingParams(max_tokens=50, guided_decoding=GuidedDecoding(**BOMBS[name]))
    )
    free = llm.stream("The quick", FREE)
    text = next(free).deltas[0].text
    with pytest.raises(InvalidParameter) as caught:
        next(stream)
    assert caught.value.field == f"guided_decoding.{next(iter(BOMBS[name]))}"
    assert len(caught.value.message) < 1000
    text += "".join(delta.text for output in free for delta in output.deltas)
    assert text == expected
    assert llm.generate("The quick", CHOICE, progress=False)[0].text in ("yes", "no")
    llm.core.check_integrity()
    assert not llm.core.has_work


@pytest.mark.parametrize("name", HARMLESS)
def test_large_but_harmless_grammars_are_accepted(slow_grammar_llm: LLM, name: str) -> None:
    params = SamplingParams(max_tokens=60, seed=1, guided_decoding=GuidedDecoding(**HARMLESS[name]))
    outputs = list(slow_grammar_llm.stream("The quick", params))
    assert outputs[-1].finished
    slow_grammar_llm.core.check_integrity()


def test_a_grammar_that_exceeds_the_limits_during_generation(slow_grammar_llm: LLM) -> None:
    """A grammar that passes the check ends its sequence when it exceeds the library's limits."""
    params = SamplingParams(
        max_tokens=400, seed=1, guided_decoding=GuidedDecoding(regex="([a-z]{1,1000}){1,1000}")
    )
    free = slow_grammar_llm.stream("The quick", FREE)
    next(free)
    with pytest.raises(InvalidParameter, match="too many expressions"):
        list(slow_grammar_llm.stream("The quick", params))
    assert list(free)[-1].finished
    slow_grammar_llm.core.check_integrity()
    assert not slow_grammar_llm.core.has_work


def test_rejected_grammars_are_cached(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    params = SamplingParams(guided_decoding=GuidedDecoding(**BOMBS["a large multiple"]))
    for _ in range(2):
        with pytest.raises(InvalidParameter, match="too complex"):
            llm.generate("The quick", params, progress=False)
        monkeypatch.setattr(GrammarSandbox, "check", None)  # is not checked again


@pytest.fixture
async def engine(request: pytest.FixtureRequest, llama_checkpoint: Path) -> AsyncIterator[AsyncEngine]:
    options = {"num_blocks": 64, "num_threads": 1, "grammar_timeout": getattr(request, "param", TIMEOUT)}
    engine = await AsyncEngine.start(EngineConfig.from_options(str(llama_checkpoint), options))
    yield engine
    await engine.stop()


async def text_of(engine: AsyncEngine, params: SamplingParams) -> str:
    async with aclosing(engine.generate(GenerationRequest("The quick", params))) as outputs:
        return "".join([delta.text async for output in outputs for delta in output.deltas])


async def test_mixed_requests_in_an_engine_process(engine: AsyncEngine) -> None:
    """Concurrent bombs, invalid grammars, aborted requests and valid requests."""
    free = await text_of(engine, FREE)
    bombs = [SamplingParams(guided_decoding=GuidedDecoding(**BOMBS[n])) for n in list(BOMBS)[:6]]
    bad = [SamplingParams(guided_decoding=GuidedDecoding(regex=f"a({i}")) for i in range(6)]
    good = [FREE, CHOICE] * 6
    leaving = [asyncio.create_task(text_of(engine, params)) for params in bombs]
    tasks = [asyncio.create_task(text_of(engine, params)) for params in [*bombs, *bad, *good]]
    await asyncio.sleep(0.2)
    for task in leaving:
        task.cancel()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    for result in await asyncio.gather(
        *leaving, return_exceptions=True
    ):  # some may be rejected before they are cancelled
        assert isinstance(result, asyncio.CancelledError | InvalidParameter)
    assert all(isinstance(result, InvalidParameter) for result in results[: len(bombs) + len(bad)])
    for params, result in zip(good, results[len(bombs) + len(bad) :], strict=True):
        assert result == free if params is FREE else result in ("yes", "no")
    stats = await engine.check_integrity()
    assert (stats.num_running, stats.num_waiting, stats.num_used_blocks) == (0, 0, 0)


@pytest.mark.parametrize("engine", [60], indirect=True)
async def test_abort_while_compiling(engine: AsyncEngine) -> None:
    bomb = SamplingParams(guided_decoding=GuidedDecoding(**BOMBS["a large multiple"]))
    task = asyncio.create_task(text_of(engine, bomb))
    while not (await engine.check_integrity()).num_waiting:
        assert not task.done()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (await engine.check_integrity()).num_waiting == 0
    assert await text_of(engine, CHOICE) in ("yes", "no")


async def test_large_integers_are_sent_to_the_engine(engine: AsyncEngine) -> None:
    schema = {
        "type": "object",
        "properties": {"n": {"const": 10**30}},
        "required": ["n"],
        "additionalProperties": False,
    }
    params = SamplingParams(guided_decoding=GuidedDecoding(json=schema, disable_any_whitespace=True))
    assert json.loads(await text_of(engine, params))


def test_prepare_grammars_loads_the_token_table(
    llama_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = LLM(llama_checkpoint, runner="reference", prepare_grammars=True)
    monkeypatch.setattr(TokenTable, "of", None)  # it is not loaded again
    assert llm.generate("The quick", CHOICE, progress=False)[0].text in ("yes", "no")
    assert not llm.core.has_work

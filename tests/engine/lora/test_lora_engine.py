"""Loading and unloading adapters while an engine runs: versions, limits, eviction, and the engine process."""

from __future__ import annotations

import asyncio
import random
import shutil
from contextlib import aclosing

import numpy as np
import pytest
from peft_adapters import greedy_with, write_adapter
from safetensors.numpy import load_file, save_file

from neso.engine.client.async_engine import AsyncEngine
from neso.engine.client.llm import LLM
from neso.engine.config import EngineConfig
from neso.engine.errors import EngineError
from neso.engine.lora.manager import LoraManager
from neso.engine.runners.native.packing import INT4, INT8, quantize
from neso.generation import GenerationRequest, InvalidParameter, LoraRequest, SamplingParams

MAX_TOKENS = 12
GREEDY = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)
PROMPT = list(range(7, 47))


@pytest.fixture(scope="module")
def expected(llama_checkpoint, adapters):
    """Return peft's tokens by adapter; the last entry without an adapter."""
    return [greedy_with(llama_checkpoint, path, [PROMPT], MAX_TOKENS)[0] for path in (*adapters, None)]


def open_llm(checkpoint, **options) -> LLM:
    return LLM(checkpoint, **{"runner": "reference", "enable_lora": True, "num_blocks": 64, **options})


def tokens(llm, lora=None, params=GREEDY):
    (result,) = llm.generate([PROMPT], params, lora=lora, progress=False)
    llm.core.check_integrity()
    return result.outputs[0].token_ids


def test_reused_name_does_not_hit_blocks_of_old_weights(llama_checkpoint, adapters, expected):
    llm = open_llm(llama_checkpoint)
    for number in (0, 1, 0, 1):
        llm.load_lora("same", adapters[number])
        assert tokens(llm, "same") == expected[number]
        assert tokens(llm, "same") == expected[number], "from its own blocks"
    assert tokens(llm) == expected[-1]
    stats = llm.core.stats()
    assert stats.prefix_hit_tokens == 4 * 32, "each version meets its own blocks, once"


def test_unloading_and_reloading_while_in_use(llama_checkpoint, adapters, expected):
    """A request keeps the weights that it started with."""
    llm = open_llm(llama_checkpoint)
    llm.load_lora("a", adapters[0])
    streams = []
    for change in (lambda: llm.load_lora("a", adapters[1]), lambda: llm.unload_lora("a")):
        stream = llm.stream(PROMPT, GREEDY, lora="a")
        streams.append(list(next(stream).deltas[0].token_ids))
        change()
        streams[-1] += [token for output in stream for token in output.deltas[0].token_ids]
    assert streams == expected[:2]
    with pytest.raises(InvalidParameter, match="LoRA a is not supported"):
        tokens(llm, "a")
    with pytest.raises(EngineError, match="there is no adapter 'a'"):
        llm.unload_lora("a")
    manager = llm.core.addon(LoraManager)
    assert len(manager._cache) == 0 and not manager._name_of, "nothing is left of it"


def test_a_failed_reload_keeps_the_old_adapter(llama_checkpoint, adapters, expected):
    llm = open_llm(llama_checkpoint)
    llm.load_lora("a", adapters[0])
    with pytest.raises(EngineError, match="no such directory"):
        llm.load_lora("a", "/nowhere")
    assert tokens(llm, "a") == expected[0]


def test_adapters_beyond_the_memory_are_read_again(llama_checkpoint, adapters, expected):
    one = open_llm(llama_checkpoint)
    one.load_lora("a", adapters[0])
    size = one.core.addon(LoraManager)._cache.num_bytes
    llm = open_llm(llama_checkpoint, lora_cache_host_memory_bytes=int(2.5 * size))
    for number, path in enumerate(adapters):
        llm.load_lora(str(number), path)
    assert len(llm.core.addon(LoraManager)._cache) == 2
    for number in (0, 4, 1, 3, 2, 0):
        assert tokens(llm, str(number)) == expected[number]
        assert len(llm.core.addon(LoraManager)._cache) <= 2
    assert list(llm.list_loras()) == [str(number) for number in range(5)]


def test_adapters_in_use_are_not_evicted(llama_checkpoint, adapters, expected, monkeypatch):
    one = open_llm(llama_checkpoint)
    one.load_lora("a", adapters[0])
    size = one.core.addon(LoraManager)._cache.num_bytes
    llm = open_llm(llama_checkpoint, lora_cache_host_memory_bytes=int(1.5 * size))
    llm.load_lora("a", adapters[0])
    stream = llm.stream(PROMPT, GREEDY, lora="a")
    got = list(next(stream).deltas[0].token_ids)
    manager = llm.core.addon(LoraManager)
    take_loaded = manager.take_loaded

    def take_loaded_after_load():
        manager.wait(timeout=60)  # otherwise "a" may end before "b" is read
        return take_loaded()

    with monkeypatch.context() as patch:
        patch.setattr(manager, "take_loaded", take_loaded_after_load)
        with pytest.raises(
            InvalidParameter, match=r"no room: those in use take .*lora_cache_host_memory_bytes"
        ):
            tokens(llm, LoraRequest(name="b", path=str(adapters[1])))
    got += [token for output in stream for token in output.deltas[0].token_ids]
    assert got == expected[0]
    assert tokens(llm, LoraRequest(name="b", path=str(adapters[1]))) == expected[1], "now there is"


def test_requests_wait_for_a_slot_while_others_run(llama_checkpoint, adapters, expected):
    llm = open_llm(llama_checkpoint, max_loras=1)
    for number in (0, 1):
        llm.load_lora(str(number), adapters[number])
    names = ["0", "1", None, "0", "1", None]
    results = llm.generate([PROMPT] * 6, GREEDY, lora=names, progress=False)
    assert [r.outputs[0].token_ids for r in results] == [expected[int(n) if n else -1] for n in names]


def test_an_adapter_that_the_runner_rejects_fails_only_its_requests(
    llama_checkpoint, adapters, expected, monkeypatch
):
    llm = open_llm(llama_checkpoint, max_loras=2)
    for number in (0, 1):
        llm.load_lora(str(number), adapters[number])
    working, versions = llm.core.runner.set_adapter, []

    def fail_for_first(slot, packed):
        versions.append(packed)
        if packed is versions[0]:
            raise MemoryError("no room")
        working(slot, packed)

    with monkeypatch.context() as patch:
        patch.setattr(llm.core.runner, "set_adapter", fail_for_first)
        streams = [llm.stream(PROMPT, GREEDY, lora=lora) for lora in ("0", "1", None)]
        with pytest.raises(EngineError, match="its adapter failed: no room"):
            list(streams[0])
        llm.core.check_integrity()
        for number, stream in ((1, streams[1]), (-1, streams[2])):
            got = [token for output in stream for token in output.deltas[0].token_ids]
            assert got == expected[number]
    assert tokens(llm, "0") == expected[0], "it is tried again"


@pytest.mark.parametrize("runner", ["reference", "native"])
def test_sequences_of_a_request_share_the_adapter(llama_checkpoint, adapters, runner):
    llm = open_llm(llama_checkpoint, runner=runner)
    llm.load_lora("a", adapters[0])
    params = SamplingParams(n=3, temperature=0.8, seed=5, max_tokens=10, ignore_eos=True)
    (together,) = llm.generate([PROMPT], params, lora="a", progress=False)
    mixed = llm.generate([PROMPT] * 3, params, lora=[None, "a", None], progress=False)[1]
    assert [o.token_ids for o in together.outputs] == [o.token_ids for o in mixed.outputs]
    llm.core.check_integrity()


def test_random_operations(llama_checkpoint, adapters, expected, tmp_path):
    """Loads, unloads, aborts, broken adapters and requests in any order: completed requests have the right tokens."""
    broken = shutil.copytree(adapters[0], tmp_path / "broken")
    (broken / "adapter_model.safetensors").write_bytes(b"nothing")
    llm = open_llm(llama_checkpoint, max_loras=2, num_blocks=24, block_size=4, max_num_seqs=4)
    rng = random.Random(1)
    meant: dict[str, int] = {}
    streams: list[tuple[int, list[int], object]] = []
    answered = 0
    for _ in range(300):
        name = rng.choice("abc")
        match rng.randrange(14):
            case 0:
                meant[name] = rng.randrange(len(adapters))
                llm.load_lora(name, adapters[meant[name]])
            case 1 if name in meant and rng.random() < 0.3:
                llm.unload_lora(name)
                del meant[name]
            case 2:
                with pytest.raises(EngineError):
                    llm.load_lora(name, broken)
            case 3 if streams and rng.random() < 0.3:
                streams.pop(rng.randrange(len(streams)))[2].close()
            case _ if streams and rng.random() < 0.85:
                number, got, stream = rng.choice(streams)
                output = next(stream, None)
                if output is None:
                    streams.remove((number, got, stream))
                    assert got == expected[number]
                    answered += 1
                else:
                    got += output.deltas[0].token_ids
            case _:
                requested = rng.choice([None, *meant])
                stream = llm.stream(PROMPT, GREEDY, lora=requested)
                output = next(stream)  # the request starts here
                streams.append((meant.get(requested, -1), list(output.deltas[0].token_ids), stream))
        llm.core.check_integrity()
    assert answered > 5
    for _, _, stream in streams:
        stream.close()
    for name in list(meant):
        llm.unload_lora(name)
    llm.core.step()
    assert len(llm.core.addon(LoraManager)._cache) == 0 and not llm.core.addon(LoraManager)._name_of


def rounded_checkpoint(base, directory, quantization):
    """Return a checkpoint with the dequantized values of the quantized matrices."""
    shutil.copytree(base, directory)
    path = directory / "model.safetensors"
    tensors = dict(load_file(path))
    for name, tensor in tensors.items():
        if tensor.ndim == 2 and "embed_tokens" not in name:
            # The output matrix has 8 bits in any case.
            scheme = INT4 if quantization == "int4" and "lm_head" not in name else INT8
            tensors[name] = quantize(tensor, scheme, threads=1).dequantize()
    save_file(tensors, path, metadata={"format": "pt"})
    return directory


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_adapters_on_quantized_weights(checkpoint_factory, tmp_path, quantization):
    """Adapters add the same to quantized weights as to others; adapter and cache are bfloat16 here."""
    base = checkpoint_factory("llama", hidden_size=64, intermediate_size=128)
    adapter = write_adapter(base, tmp_path / "adapter", seed=3)
    rounded = rounded_checkpoint(base, tmp_path / "rounded", quantization)
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)

    def logprobs(model, lora, **options):
        llm = LLM(model, dtype="float32", lora_modules={"a": str(adapter)}, num_blocks=64, **options)
        (result,) = llm.generate([PROMPT], params, lora=lora, progress=False)
        return np.array([entry.logprob for entry in result.prompt_logprobs if entry is not None])

    exact = logprobs(rounded, "a", runner="reference")
    found = logprobs(base, "a", runner="native", quantization=quantization)
    plain = logprobs(base, None, runner="native", quantization=quantization)
    assert abs(found - exact).mean() < 0.05 * abs(plain - exact).mean()


@pytest.fixture(params=["thread", "process"])
async def engine(request, llama_checkpoint, adapters):
    options = {"num_blocks": 64, "lora_modules": {"0": str(adapters[0])}, "dtype": "float32"}
    config = EngineConfig.from_options(str(llama_checkpoint), options)
    engine = await AsyncEngine.start(config, in_process=request.param == "thread")
    yield engine
    await engine.stop()


async def generate(engine, lora):
    request = GenerationRequest(PROMPT, GREEDY, lora=LoraRequest(name=lora) if lora else None)
    async with aclosing(engine.generate(request)) as outputs:
        return [token async for output in outputs for delta in output.deltas for token in delta.token_ids]


async def test_loading_through_the_engine_process(engine, adapters, expected):
    assert engine.list_loras() == {"0": str(adapters[0])}
    assert await generate(engine, "0") == expected[0]
    running = asyncio.gather(*(generate(engine, name) for name in ("0", None, "0")))
    await asyncio.gather(*(engine.load_lora(LoraRequest(name=str(n), path=str(adapters[n]))) for n in (1, 2)))
    assert await running == [expected[0], expected[-1], expected[0]]
    assert await asyncio.gather(*(generate(engine, n) for n in "210")) == [expected[n] for n in (2, 1, 0)]
    await engine.unload_lora("1")
    assert list(engine.list_loras()) == ["0", "2"]
    with pytest.raises(InvalidParameter, match="LoRA 1 is not supported"):
        await generate(engine, "1")
    with pytest.raises(EngineError, match="there is no adapter '1'"):
        await engine.unload_lora("1")
    with pytest.raises(EngineError, match="no such directory"):
        await engine.load_lora(LoraRequest(name="1", path="/nowhere"))
    assert (await engine.check_integrity()).num_used_blocks == 0

"""Decode throughput with 1 to 64 different LoRA adapters in a batch, relative to decoding without adapters.

One engine decodes the same sequences with and without adapters, in turns; the ratio is the ratio of the median step
times. All seven matrices of each layer are adapted. `--load` measures loading an adapter at run time: reading, packing,
and the longest step meanwhile.

usage: python bench/lora.py [s|m|l] [--quantization int8] [--ranks 8 16 64] [--batches 1 64] [--load]
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import tempfile
import time
from pathlib import Path

import ml_dtypes
import numpy as np
from checkpoint import SHAPES, write_checkpoint
from safetensors.numpy import save_file
from smoke import parse_arguments

from neso.engine.config import EngineConfig
from neso.engine.core.request import EngineRequest
from neso.engine.load.loader import load_engine
from neso.engine.loop.engine_core import EngineCore
from neso.engine.lora.manager import LoraManager
from neso.generation import LoraRequest, SamplingParams

PROMPT, STEPS, ROUNDS = 32, 12, 4


def write_adapter(directory: Path, size: str, rank: int, seed: int) -> None:
    """Write an adapter of all seven matrices in peft's format, bfloat16."""
    shape = SHAPES[size]
    hidden, intermediate = shape["hidden"], shape["intermediate"]
    kv = hidden // shape["heads"] * shape["kv_heads"]
    matrices = {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (intermediate, hidden),
        "mlp.up_proj": (intermediate, hidden),
        "mlp.down_proj": (hidden, intermediate),
    }
    rng = np.random.default_rng(seed)
    tensors = {}
    for layer in range(shape["layers"]):
        for name, (outputs, inputs) in matrices.items():
            for side, sides in (("A", (rank, inputs)), ("B", (outputs, rank))):
                values = rng.standard_normal(sides, np.float32) * 0.01
                key = f"base_model.model.model.layers.{layer}.{name}.lora_{side}.weight"
                tensors[key] = values.astype(ml_dtypes.bfloat16)
    directory.mkdir(parents=True)
    save_file(tensors, directory / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank}
    (directory / "adapter_config.json").write_text(json.dumps(config))


def start(core: EngineCore, batch: int, names: list[str]) -> list[str]:
    """Add and prefill `batch` sequences, assigning the adapters cyclically; return their ids."""
    rng = np.random.default_rng(1)
    requests = [
        EngineRequest(
            request_id=f"{time.perf_counter_ns()}-{i}",
            prompt_token_ids=rng.integers(10, 8000, PROMPT).tolist(),
            sampling=SamplingParams(temperature=0),
            max_tokens=STEPS + 16,
            lora=LoraRequest(name=name) if (name := next(cycle, "")) else None,
        )
        for cycle in [itertools.cycle(names)]
        for i in range(batch)
    ]
    for request in requests:
        assert core.add(request) == []
    while any(s.num_uncomputed_tokens > 1 for s in (*core.scheduler.running, *core.scheduler.waiting)):
        for output in core.step():
            assert not output.error, output.error
    return [request.request_id for request in requests]


def decode(core: EngineCore, batch: int, names: list[str]) -> list[float]:
    """Seconds of each decode step of a batch."""
    requests = start(core, batch, names)
    core.step()
    seconds = []
    for _ in range(STEPS):
        started = time.perf_counter()
        core.step()
        seconds.append(time.perf_counter() - started)
    for request in requests:
        core.abort(request)
    core.step()
    return seconds


def compare(core: EngineCore, batch: int, names: list[str]) -> tuple[float, float]:
    """Median seconds per step without and with adapters, measured in turns."""
    plain, adapted = [], []
    for _ in range(ROUNDS):
        plain += decode(core, batch, [])
        adapted += decode(core, batch, names)
    return statistics.median(plain), statistics.median(adapted)


def open_core(checkpoint: Path, modules: dict[str, str], quantization: str | None) -> EngineCore:
    options = {
        "max_num_seqs": 64,
        "max_model_len": 128,
        "enable_prefix_caching": False,
        "enable_lora": True,
        "lora_modules": modules,
        "max_loras": 64,
        "lora_cache_host_memory_bytes": 32 << 30,
    }
    if quantization is not None:
        options["quantization"] = quantization
    core, _ = load_engine(EngineConfig.from_options(str(checkpoint), options))
    return core


def time_load(core: EngineCore, adapter: Path) -> None:
    """Load an adapter while a batch decodes."""
    lora = core.addon(LoraManager)
    assert lora is not None
    usual = statistics.median(decode(core, 8, []))
    requests = start(core, 8, [])
    done: list[object] = []
    started = time.perf_counter()
    lora.load(LoraRequest(name="hot", path=str(adapter)), done.append)
    longest = 0.0
    while not done:
        step = time.perf_counter()
        core.step()
        longest = max(longest, time.perf_counter() - step)
    seconds = time.perf_counter() - started
    for request in requests:
        core.abort(request)
    core.step()
    print(
        f"load {seconds * 1e3:.0f} ms; longest step meanwhile {longest * 1e3:.1f} ms, usually {usual * 1e3:.1f} ms"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("size", nargs="?", choices=sorted(SHAPES), default="s")
    parser.add_argument("--quantization", choices=["int8", "int4", "int8_dynamic"])
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 16, 64])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--adapters", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--load", action="store_true")
    arguments = parse_arguments(parser, ranks=[8], batches=[2], adapters=[1, 2])
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = Path(folder) / "base"
        write_checkpoint(checkpoint, arguments.size)
        print(
            f"{'rank':>4} {'batch':>5} {'adapters':>8} {'plain ms':>9} {'adapted ms':>10} {'throughput':>10}"
        )
        for rank in arguments.ranks:
            adapters = {f"a{i}": Path(folder) / f"{rank}-{i}" for i in range(max(arguments.adapters))}
            for seed, path in enumerate(adapters.values()):
                write_adapter(path, arguments.size, rank, seed)
            core = open_core(
                checkpoint, {name: str(path) for name, path in adapters.items()}, arguments.quantization
            )
            if arguments.load:
                time_load(core, next(iter(adapters.values())))
                continue
            for batch, count in itertools.product(arguments.batches, arguments.adapters):
                if count <= batch:
                    plain, adapted = compare(core, batch, list(adapters)[:count])
                    figures = f"{plain * 1e3:>9.2f} {adapted * 1e3:>10.2f} {plain / adapted:>10.2f}"
                    print(f"{rank:>4} {batch:>5} {count:>8} {figures}", flush=True)


if __name__ == "__main__":
    main()

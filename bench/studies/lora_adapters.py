"""How many LoRA adapters a server carries without losing throughput.

One server has all adapters. Runs with 1, 2, 4, … adapters in turn alternate with runs of the base model. The ratio of
each pair is printed with its bootstrap interval.

usage: python bench/studies/lora_adapters.py [s|m] [--adapters 1 2 4 8 16] [--rank 8] [--concurrency 16] [--requests 64]
                                             [--plot FILE.svg]
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))

from checkpoint import write_checkpoint
from lora import write_adapter
from neso_server import served
from smoke import parse_arguments

from neso.perf.api import EndpointOptions, InputOptions, LoadGenerator, LoadPlan, Measurement, open_source
from neso.perf.compare import ratio_of
from neso.perf.report.charts import Chart, Limit, Series


def measure(endpoint: EndpointOptions, inputs: InputOptions, plan: LoadPlan) -> Measurement:
    with LoadGenerator(endpoint, open_source(inputs, "completions", endpoint.models)) as generator:
        return Measurement(generator.run(plan, warm_up=replace(plan, requests=plan.concurrency)))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("size", nargs="?", default="s", choices=("tiny", "s", "m"))
    parser.add_argument("--adapters", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--plot", type=Path)
    arguments = parse_arguments(parser, size="tiny", adapters=[1, 2], concurrency=2, requests=8)
    plan = LoadPlan(concurrency=arguments.concurrency, requests=arguments.requests)
    name = "output_token_throughput"
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = Path(folder) / "base"
        write_checkpoint(checkpoint, arguments.size)
        names = [f"adapter-{i}" for i in range(max(arguments.adapters))]
        for i, adapter in enumerate(names):
            write_adapter(Path(folder) / adapter, arguments.size, arguments.rank, i)
        modules = [f"--lora-modules={adapter}={folder}/{adapter}" for adapter in names]
        limits = [
            f"--engine-config=max_loras={len(names)}",
            f"--engine-config=max_lora_rank={arguments.rank}",
        ]
        inputs = InputOptions(
            tokenizer=str(checkpoint),
            input_tokens_mean=64,
            output_tokens_mean=32,
            extra_inputs=("ignore_eos:true",),
        )
        with served(f"base={checkpoint}", *modules, *limits) as server:
            url = f"localhost:{server.ports['http']}"
            base = EndpointOptions(models=("base",), urls=(url,), endpoint_type="completions", streaming=True)
            ratios = []
            for seed, number in enumerate(arguments.adapters):
                # Each pair has its own prompts. Otherwise the base model finds those of the previous pair in its cache.
                inputs = replace(inputs, random_seed=seed)
                without = measure(base, inputs, plan)
                adapted = measure(replace(base, adapters=tuple(names[:number])), inputs, plan)
                ratio = ratio_of([without], [adapted], name, "avg")
                value = adapted.summaries[name].avg / without.summaries[name].avg
                ratios.append(value)
                bounds = "" if ratio is None else f" ({ratio.low:.2f} to {ratio.high:.2f})"
                speed = adapted.summaries[name].avg
                print(
                    f"{number:3} adapters: {speed:7.1f} tok/s, {value:.3f} of the base model{bounds}",
                    flush=True,
                )
    if arguments.plot:
        points = Series("", [float(n) for n in arguments.adapters], ratios, marks=True)
        title = f"LoRA adapters of rank {arguments.rank} in one batch of {arguments.concurrency}"
        limit = (Limit(1.0, "base model"),)
        Chart(title, "adapters", "throughput, relative to the base model", (points,), limits=limit).save(
            arguments.plot
        )


if __name__ == "__main__":
    main()

"""Goodput against the request rate: the rate beyond which more requests mean fewer good ones.

The capacity is measured with a closed loop first. Rates are shares of it, with Poisson arrivals. The objectives are
multiples of the latencies of a single request, so that they fit the machine.

usage: python bench/studies/goodput_by_rate.py [MODEL] [--shares 0.25 0.5 0.7 0.85 1.0 1.2 1.5] [--seconds 15]
                                               [--factor 4] [--plot FILE.svg]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))

from neso_server import served
from smoke import parse_arguments

from neso.perf.api import (
    EndpointOptions,
    InputOptions,
    LoadGenerator,
    LoadPlan,
    Measurement,
    open_source,
    parse_slos,
)
from neso.perf.load.plan import Arrival
from neso.perf.report.charts import Chart, Series


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", nargs="?", default="neso-pilot")
    parser.add_argument("--shares", type=float, nargs="+", default=[0.25, 0.5, 0.7, 0.85, 1.0, 1.2, 1.5])
    parser.add_argument("--seconds", type=float, default=15)
    parser.add_argument(
        "--concurrency", type=int, default=16, help="of the closed loop that finds the capacity"
    )
    parser.add_argument(
        "--factor", type=float, default=4, help="objectives as a multiple of the latencies of one request"
    )
    parser.add_argument("--plot", type=Path)
    arguments = parse_arguments(parser, shares=[0.5, 1.2], seconds=1.0, concurrency=4)
    inputs = InputOptions(input_tokens_mean=100, output_tokens_mean=32, extra_inputs=("ignore_eos:true",))
    with served(arguments.model) as server:
        name = arguments.model.rstrip("/").rsplit("/", 1)[-1]
        url = f"localhost:{server.ports['http']}"
        endpoint = EndpointOptions(models=(name,), urls=(url,), endpoint_type="completions", streaming=True)
        with LoadGenerator(endpoint, open_source(inputs, "completions", (name,))) as generator:
            generator.run(LoadPlan(requests=4))
            alone = Measurement(generator.run(LoadPlan(requests=10)))
            limits = {
                metric: arguments.factor * alone.summaries[metric].percentiles[50]
                for metric in ("time_to_first_token", "inter_token_latency")
            }
            slos = parse_slos([f"{metric}:{limit:.6f}" for metric, limit in limits.items()])
            closed = LoadPlan(concurrency=arguments.concurrency, seconds=arguments.seconds)
            capacity = Measurement(generator.run(closed)).summaries["request_throughput"].avg
            print(
                f"capacity {capacity:.1f} requests/s; objectives "
                + ", ".join(f"{k} {v:.1f} ms" for k, v in limits.items())
            )
            rates, served_rates, good_rates = [], [], []
            for share in arguments.shares:
                plan = LoadPlan(
                    concurrency=0, rate=share * capacity, arrival=Arrival.POISSON, seconds=arguments.seconds
                )
                run = Measurement(generator.run(plan), slos=slos)
                rates.append(share)
                served_rates.append(run.summaries["request_throughput"].avg / capacity)
                good_rates.append(run.summaries["goodput"].avg / capacity)
                print(
                    f"rate {share:4.2f} of capacity: {served_rates[-1]:.2f} served, {good_rates[-1]:.2f} good",
                    flush=True,
                )
    best = max(range(len(rates)), key=good_rates.__getitem__)
    print(f"best goodput {good_rates[best]:.2f} of capacity, at a rate of {rates[best]:.2f}")
    if arguments.plot:
        lines = (
            Series("served", rates, served_rates, marks=True),
            Series("good", rates, good_rates, marks=True),
        )
        label = "requests/s, relative to capacity"
        Chart("Goodput by request rate", "request rate, relative to capacity", label, lines).save(
            arguments.plot
        )


if __name__ == "__main__":
    main()

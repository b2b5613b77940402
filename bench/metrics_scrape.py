"""Duration of a scrape of /metrics with many models, and how long it blocks the event loop.

python bench/metrics_scrape.py --models 300 --summaries
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from pathlib import Path

from smoke import parse_arguments

from neso.server.core import Core
from neso.server.metrics.config import MetricsConfig
from neso.server.options import ServerOptions
from neso.server.statistics import Timeline

MODEL = "class TritonPythonModel:\n    def execute(self, requests):\n        return []\n"
TENSORS = 'backend: "python"\ninput { name: "IN" data_type: TYPE_FP32 dims: [ 1 ] }\n'


def write_models(folder: Path, count: int) -> None:
    """Write empty Python models."""
    for i in range(count):
        version = folder / f"m{i}" / "1"
        version.mkdir(parents=True)
        (version / "model.py").write_text(MODEL)
        (version.parent / "config.pbtxt").write_text(TENSORS)


async def measure(repository: Path, summaries: bool, scrapes: int) -> None:
    config = MetricsConfig(summary_latencies=summaries)
    core = Core(ServerOptions(model_repository=(repository,), metrics=config))
    await core.start()
    models = core.models()
    for model in models:
        for _ in range(100):
            model.statistics.record_success(Timeline(), 1)
    took, lines, stall = await _scrape(core, scrapes)
    await core.stop()
    print(
        f"{len(models)} models, {lines} lines: {took * 1e3:.1f} ms per scrape, "
        f"longest stall of the loop {stall * 1e3:.1f} ms"
    )


async def _scrape(core: Core, scrapes: int) -> tuple[float, int, float]:
    """Seconds per scrape, number of lines, and the longest blocking of the loop."""
    stall = 0.0

    async def measure_stall() -> None:
        nonlocal stall
        last = time.perf_counter()
        while True:
            await asyncio.sleep(0)
            now = time.perf_counter()
            stall, last = max(stall, now - last), now

    await core.render_metrics()
    task = asyncio.ensure_future(measure_stall())
    await asyncio.sleep(0)
    started = time.perf_counter()
    for _ in range(scrapes):
        text = await core.render_metrics()
    took = (time.perf_counter() - started) / scrapes
    task.cancel()
    return took, text.count(b"\n"), stall


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", type=int, default=300)
    parser.add_argument("--summaries", action="store_true")
    parser.add_argument("--scrapes", type=int, default=5)
    arguments = parse_arguments(parser, models=5, scrapes=1)
    with tempfile.TemporaryDirectory() as folder:
        write_models(Path(folder), arguments.models)
        asyncio.run(measure(Path(folder), arguments.summaries, arguments.scrapes))


if __name__ == "__main__":
    main()

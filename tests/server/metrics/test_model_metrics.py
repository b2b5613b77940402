"""Optional metrics of models, exported by the core."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from core_requests import collect, send_request
from prometheus_client.parser import text_string_to_metric_families
from repository_builder import IDENTITY_TENSORS, REPEAT, REPEAT_TENSORS

from neso.server.errors import NotFound
from neso.server.metrics.config import MetricsConfig, Quantile
from neso.server.metrics.custom import MetricKind
from neso.server.metrics.model_metrics import KV_CACHE_FAMILY, KvCacheLoad

STAGES = ("request", "queue", "compute_input", "compute_infer", "compute_output")
CACHED = IDENTITY_TENSORS + "response_cache { enable: true }"
HISTOGRAM = "nv_inference_first_response_histogram_ms"


async def lines_of(core) -> list[str]:
    text = (await core.render_metrics()).decode()
    assert list(text_string_to_metric_families(text)), "it is what Prometheus reads"
    return text.splitlines()


async def infer(model, count: int = 1) -> None:
    for _ in range(count):
        await collect(send_request(model, IN=np.ones(1, np.float32)))


async def test_only_counters_by_default(repository, start_core):
    repository.add("identity")
    repository.add("repeat", REPEAT, REPEAT_TENSORS)
    core = await start_core()
    await infer(core.model("identity"))
    text = "\n".join(await lines_of(core))
    assert "summary" not in text and "histogram" not in text and "nv_cache" not in text
    assert core.model("identity").statistics.latencies is None
    assert core.model("repeat").statistics.responses.first_response_ms is None


async def test_summaries(repository, start_core):
    repository.add("identity")
    quantiles = (Quantile(0.5, "0.5"), Quantile(0.9, "0.9"))
    core = await start_core(metrics=MetricsConfig(summary_latencies=True, summary_quantiles=quantiles))
    labels = 'model="identity",version="1"'
    assert f'nv_inference_request_summary_us{{{labels},quantile="0.5"}} NaN' in await lines_of(core)
    await infer(core.model("identity"), 5)
    with pytest.raises(NotFound):
        await infer(core.model("absent"))
    lines = await lines_of(core)
    values = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    for stage in STAGES:
        name = f"nv_inference_{stage}_summary_us"
        assert f"# TYPE {name} summary" in lines
        assert values[f"{name}_count{{{labels}}}"] == "5"
        assert values[f"{name}_sum{{{labels}}}"] == values[f"nv_inference_{stage}_duration_us{{{labels}}}"]
        low, high = (float(values[f'{name}{{{labels},quantile="{q.text}"}}']) for q in quantiles)
        assert 0 <= low <= high <= float(values[f"{name}_sum{{{labels}}}"]) * 1.01 + 1
    assert "nv_cache_hit_summary_per_model" not in "\n".join(lines)


async def test_summaries_of_cached_model(repository, start_core):
    repository.add("identity", config=CACHED)
    core = await start_core(metrics=MetricsConfig(summary_latencies=True), response_cache_size=1 << 20)
    await infer(core.model("identity"), 3)
    lines = await lines_of(core)
    labels = 'model="identity",version="1"'
    for name, count in (
        ("nv_cache_hit_summary_per_model", 2),
        ("nv_cache_miss_summary_per_model", 1),
        ("nv_inference_queue_summary_us", 3),
        ("nv_inference_compute_infer_summary_us", 1),
    ):
        assert f"{name}_count{{{labels}}} {count}" in lines
    assert "nv_inference_request_summary_us" not in "\n".join(lines), "as in Triton"


async def test_latency_counters_can_be_disabled(repository, start_core):
    repository.add("identity", config=CACHED)
    core = await start_core(metrics=MetricsConfig(counter_latencies=False), response_cache_size=1 << 20)
    await infer(core.model("identity"))
    text = "\n".join(await lines_of(core))
    assert "duration_us" not in text and "nv_cache" not in text
    assert 'nv_inference_request_success{model="identity",version="1"} 1' in text


async def test_first_response_histogram(repository, start_core):
    repository.add("identity")
    repository.add("repeat", REPEAT, REPEAT_TENSORS)
    buckets = f'metric_identifier {{ family: "{HISTOGRAM}" }} histogram_options {{ buckets: [ -1, 0.0, 0.5, 30000 ] }}'
    repository.add("own", REPEAT, REPEAT_TENSORS + f"model_metrics {{ metric_control: [ {{ {buckets} }} ] }}")
    core = await start_core(metrics=MetricsConfig(histogram_latencies=True))
    await infer(core.model("identity"))
    for name in ("repeat", "own", "own"):
        await collect(send_request(core.model(name), COUNT=np.array([3], np.int32)))
    lines = await lines_of(core)
    assert f"# TYPE {HISTOGRAM} histogram" in lines
    assert [line.split('le="')[1].split('"')[0] for line in lines if f'{HISTOGRAM}_bucket{{model="repeat"' in line] == [
        "100", "500", "2000", "5000", "+Inf"
    ]  # fmt: skip
    assert f'{HISTOGRAM}_count{{model="repeat",version="1"}} 1' in lines, "once a request"
    assert f'{HISTOGRAM}_bucket{{model="own",version="1",le="0"}} 0' in lines
    assert f'{HISTOGRAM}_bucket{{model="own",version="1",le="30000"}} 2' in lines
    assert f'{HISTOGRAM}_count{{model="identity",version="1"}} 1' in lines, (
        "of models that are not decoupled too"
    )


async def test_non_increasing_buckets_fail_the_load(repository, start_core):
    buckets = f'metric_identifier {{ family: "{HISTOGRAM}" }} histogram_options {{ buckets: [ 2, 1 ] }}'
    repository.add(
        "repeat", REPEAT, REPEAT_TENSORS + f"model_metrics {{ metric_control: [ {{ {buckets} }} ] }}"
    )
    core = await start_core()
    (entry,) = core.repository_index()
    assert "must be monotonically increasing" in entry.reason


async def test_scrape_does_not_block_the_event_loop(repository, start_core):
    for index in range(40):
        repository.add(f"m{index}")
    core = await start_core(metrics=MetricsConfig(summary_latencies=True))
    turns = 0

    async def other() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    task = asyncio.ensure_future(other())
    text = await core.metrics.render_in_turns()
    task.cancel()
    assert turns >= 3 and text.count(b"\n") > 1500
    assert text.count(b"\n") == core.metrics.render().count(b"\n")


async def test_kv_cache_load(start_core):
    core = await start_core()
    assert core.kv_cache_load() is None

    def watch(model: str, **blocks: float) -> None:
        for kind, value in blocks.items():
            core.metrics.watch(KV_CACHE_FAMILY, (model, "1", kind), lambda value=value: value)

    watch("half", max=10)
    assert core.kv_cache_load() is None
    watch("a", max=10, used=5, tokens_per=16)
    assert core.kv_cache_load() == KvCacheLoad(0.5, 160)
    watch("b", max=30, used=5, tokens_per=32)
    assert core.kv_cache_load() == KvCacheLoad(0.25, 160 + 960)


async def test_kv_cache_load_of_python_models(repository, start_core):
    core = await start_core()
    family = core.custom_metrics.family(KV_CACHE_FAMILY.name, "", MetricKind.GAUGE)
    metrics = []
    for kind, value in {"max": 4, "used": 1, "tokens_per": 64, "free": 3}.items():
        metrics.append(family.metric({"model": "t", "version": "1", "kv_cache_block_type": kind}))
        metrics[-1].set(value)
    assert core.kv_cache_load() == KvCacheLoad(0.25, 256)

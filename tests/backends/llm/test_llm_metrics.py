"""Metrics of a language model: requests, steps, the engine, and rejected requests."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from eventually import until
from prometheus_client.parser import text_string_to_metric_families
from test_llm_backend import outputs, request, write_repository

import neso.server.core
from neso.backends.llm.metrics import AdapterMetrics, LlmMetrics
from neso.engine.client.engine_group import EngineGroup
from neso.engine.config import EngineConfig
from neso.engine.core.stats import EngineStats, KvTransferStats
from neso.engine.ipc.messages import EngineInfo
from neso.engine.lora.config import LoraConfig
from neso.server.errors import ErrorCode
from neso.server.metrics.registry import MetricsRegistry, ModelMetrics
from neso.server.options import ModelControlMode, ServerOptions

LABELS = {"model": "pilot", "version": "1"}


@asynccontextmanager
async def serving(root, **model_json):
    write_repository(root, num_blocks=64, **model_json)
    options = ServerOptions(
        model_repository=(root,),
        model_control_mode=ModelControlMode.EXPLICIT,
        startup_models=("*",),
        backend_config={"llm": {"in-process": "true"}},
    )
    core = neso.server.core.Core(options)
    await core.start()
    assert core.ready(), core.repository_index()
    try:
        yield core
    finally:
        await core.stop()


def samples(core) -> dict[tuple[str, frozenset], float]:
    families = text_string_to_metric_families(core.metrics.render().decode())
    return {
        (sample.name, frozenset(sample.labels.items() - LABELS.items())): sample.value
        for family in families
        for sample in family.samples
    }


def value(core, name: str, **labels: str) -> float:
    return samples(core)[name, frozenset(labels.items())]


async def test_a_request_is_counted_in_every_histogram(tmp_path):
    async with serving(tmp_path, block_size=2) as core:
        parameters = {"max_tokens": 5, "ignore_eos": True}
        await outputs(core, request(stream=True, parameters=parameters))
        await outputs(core, request(parameters=parameters))
        for name in (
            "time_to_first_token_seconds",
            "e2e_request_latency_seconds",
            "request_queue_time_seconds",
            "request_prefill_time_seconds",
            "request_decode_time_seconds",
            "request_inference_time_seconds",
            "request_time_per_output_token_seconds",
            "request_prompt_tokens",
            "request_generation_tokens",
            "request_max_num_generation_tokens",
            "request_params_max_tokens",
            "request_params_n",
            "request_params_best_of",
        ):
            assert value(core, f"vllm:{name}_count") == 2, name
        assert value(core, "vllm:request_max_num_generation_tokens_sum") == 10
        assert value(core, "vllm:inter_token_latency_seconds_count") == 8
        assert value(core, "vllm:request_success_total", finished_reason="length") == 2
        whole = value(core, "vllm:e2e_request_latency_seconds_sum")
        parts = ("queue", "prefill", "decode")
        assert sum(value(core, f"vllm:request_{part}_time_seconds_sum") for part in parts) == pytest.approx(
            whole
        )
        assert value(core, "vllm:prompt_tokens_cached_total") > 0


async def test_steps_are_counted(tmp_path):
    async with serving(tmp_path, max_prefill_chunk=4, enable_overlap=False) as core:
        await outputs(core, request(parameters={"max_tokens": 3, "ignore_eos": True}))
        prompt = value(core, "vllm:request_prompt_tokens_sum")
        steps = value(core, "vllm:iteration_tokens_total_count")
        # Prompt chunks are steps, although they give no output.
        assert steps == -(-prompt // 4) + 2
        assert value(core, "vllm:iteration_tokens_total_sum") == prompt + 2
        general = "nv_trt_llm_general_metrics"
        assert value(core, general, general_type="iteration_counter") == steps


async def test_aborted_and_rejected_requests_are_counted_separately(tmp_path, step_pace):
    async with serving(tmp_path, max_num_seqs=1, max_queue_size=1) as core:
        endless = {"max_tokens": 400, "ignore_eos": True}
        stream = core.model("pilot").submit(request(stream=True, parameters=endless))
        await anext(aiter(stream))
        waiting = asyncio.create_task(outputs(core, request(parameters={"max_tokens": 2})))
        await until(lambda: value(core, "vllm:num_requests_waiting"))
        (refused,) = [r async for r in core.model("pilot").submit(request())]
        assert refused.error is not None and "max_queue_size is 1" in str(refused.error)
        assert refused.error.code is ErrorCode.UNAVAILABLE
        stream.cancel()
        await waiting
        [bad] = [r async for r in core.model("pilot").submit(request(parameters={"stop_token_ids": "[-1]"}))]
        assert bad.error is not None and bad.error.code is ErrorCode.INVALID_ARG
        counts = {
            reason: value(core, "vllm:request_success_total", finished_reason=reason)
            for reason in ("stop", "length", "abort", "error")
        }
        assert counts == {"stop": 0, "length": 1, "abort": 1, "error": 1}


async def test_request_timeout_limits_the_queue_time(tmp_path, step_pace):
    async with serving(tmp_path, max_num_seqs=1) as core:
        endless = {"max_tokens": 400, "ignore_eos": True}
        stream = core.model("pilot").submit(request(stream=True, parameters=endless))
        await anext(aiter(stream))
        impatient = request()
        impatient.timeout_us = 5000
        [refused] = [r async for r in core.model("pilot").submit(impatient)]
        assert refused.error is not None and refused.error.code is ErrorCode.UNAVAILABLE
        assert "queue_timeout_ms, 5 ms" in str(refused.error)
        stream.cancel()


@pytest.mark.parametrize("kind", ["inflight_fused_batching", "V1"])
async def test_tensorrt_llm_families(tmp_path, kind):
    async with serving(tmp_path, gpt_model_type=kind) as core:
        await outputs(core, request(parameters={"max_tokens": 3, "ignore_eos": True}))
        found: dict[str, dict[str, float]] = {}
        for (name, labels), number in samples(core).items():
            if name.startswith("nv_trt_llm"):
                ((_, member),) = labels
                found.setdefault(name.removeprefix("nv_trt_llm_"), {})[member] = number
        requests = found["request_metrics"]
        assert (requests["active"], requests["max"], requests["waiting"]) == (0, 64, 0)
        assert (requests["scheduled"], requests["context"]) == (1, 0)
        assert found["runtime_memory_metrics"]["cpu"] > 1e6
        assert found["kv_cache_block_metrics"]["max"] == 64 == found["kv_cache_block_metrics"]["free"]
        if kind == "V1":
            assert found["v1_metrics"] == {
                "total_context_tokens": 5,
                "total_generation_tokens": 3,
                "empty_generation_slots": 0,
            }
            assert "inflight_batcher_metrics" not in found
        else:
            assert found["inflight_batcher_metrics"]["generation_requests"] == 1
            assert "v1_metrics" not in found


def test_kv_transfers_are_counted():
    first = KvTransferStats(leases=1, imports=2, imported_bytes=300, fallbacks_by_reason={"timeout": 2})
    second = KvTransferStats(
        imports=1, import_seconds=0.5, fallbacks_by_reason={"timeout": 1, "disconnected": 1}
    )
    stats = EngineStats.sum([EngineStats(kv_transfer=first), EngineStats(kv_transfer=second)])
    info = EngineInfo(*("native", 2048, 64, 32000, 64, 16, 2**20, 0.5), kv_address="ipc://kv#token")
    engine: Any = SimpleNamespace(info=info, stats=stats, alive=True, num_requests=0, on_dead=id, on_stats=id)
    registry = MetricsRegistry()
    LlmMetrics(ModelMetrics(registry, "pilot", "1"), EngineGroup([engine], EngineConfig(model="")))
    found = samples(SimpleNamespace(metrics=registry))
    transfers = {name: value for (name, _), value in found.items() if name.startswith("neso_kv_transfer_")}
    del transfers["neso_kv_transfer_fallbacks_total"]
    assert transfers == {
        "neso_kv_transfer_exports_total": 0,
        "neso_kv_transfer_imports_total": 3,
        "neso_kv_transfer_bytes_total": 300,
        "neso_kv_transfer_seconds_total": 0.5,
        "neso_kv_transfer_leases": 1,
        "neso_kv_transfer_expired_leases_total": 0,
    }
    reasons = {
        dict(labels)["reason"]: value
        for (name, labels), value in found.items()
        if name == "neso_kv_transfer_fallbacks_total"
    }
    assert reasons == {
        "refused": 0,
        "ended": 0,
        "timeout": 3,
        "disconnected": 1,
        "no_blocks": 0,
        "error": 0,
    }


def test_unused_names_are_removed():
    registry = MetricsRegistry()
    metrics = AdapterMetrics(ModelMetrics(registry, "pilot", "1"), LoraConfig(enable_lora=True))
    for number in range(50):
        metrics.add_waiting(f"made-up-{number}")
        if number % 2:
            metrics.start(f"made-up-{number}")
        metrics.remove(f"made-up-{number}", started=bool(number % 2))
    metrics.add_waiting("real")
    metrics.add_waiting("real")
    metrics.start("real")
    assert dict(metrics._running) == dict(metrics._waiting) == {"real": 1}
    shown = registry.render().decode()
    assert 'running_lora_adapters="real",' in shown and "made-up" not in shown

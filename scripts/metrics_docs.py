"""Writes docs/reference/metrics-reference.md from the declarations of the metrics.

Usage: `python scripts/metrics_docs.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import NamedTuple, cast

from neso.backends.llm.cluster_metrics import CLUSTER_FAMILIES, WORKER_FAMILIES
from neso.backends.llm.metrics import FALLBACK_REASONS, LlmMetrics
from neso.backends.restarts import RESTARTS
from neso.backends.stage_metrics import ENGINE_WORKER_FAMILIES, STAGE_FAMILIES, STAGE_WORKER_FAMILIES
from neso.backends.vllm.metrics import VllmMetrics
from neso.engine.client.async_engine import AsyncEngine
from neso.engine.client.engine_group import EngineGroup
from neso.engine.config import EngineConfig
from neso.engine.core.stats import EngineStats
from neso.engine.ipc.messages import EngineInfo
from neso.engine.lora.config import LoraConfig
from neso.server.metrics.config import MetricsConfig
from neso.server.metrics.machine import CPU_FAMILIES, GPU_FAMILIES, PINNED_MEMORY_FAMILIES
from neso.server.metrics.model_metrics import model_families
from neso.server.metrics.registry import Family, MetricsRegistry, ModelMetrics
from neso.server.statistics import FailureReason

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "metrics-reference.md"
HEAD = """\
# Metrics reference

All metrics that the server exports, generated from the code by `scripts/metrics_docs.py`. The guide
[Metrics](../guides/metrics.md) explains how to enable them, their meaning, queries and a dashboard.

Histograms have the samples `…_bucket` (with the label `le`), `…_sum` and `…_count`; summaries have quantiles (label
`quantile`), `…_sum` and `…_count`. Models add a label `_KEY` for each of their `metric_tags` to the families of the
first four sections. Metrics defined by Python models are not listed.
"""

_ENDINGS = {
    "_us": "µs",
    "_ms": "ms",
    "_secs": "s",
    "_seconds": "s",
    "_bytes": "bytes",
    "_perc": "0 to 1",
    "_utilization": "0 to 1",
}
_UNITS = {
    "nv_cache_hit_duration_per_model": "µs",
    "nv_cache_miss_duration_per_model": "µs",
    "nv_cache_hit_summary_per_model": "µs",
    "nv_cache_miss_summary_per_model": "µs",
    "nv_gpu_power_usage": "W",
    "nv_gpu_power_limit": "W",
    "nv_energy_consumption": "J",
    "nv_trt_llm_runtime_memory_metrics": "bytes",
    "vllm:lora_requests_info": "s since 1970",
}


class Section(NamedTuple):
    """`condition`: when these families exist. `values`: possible values of labels."""

    title: str
    condition: str
    families: list[Family]
    values: Mapping[str, list[str]] = MappingProxyType({})


def sections() -> list[Section]:
    """Return the sections; each family is in exactly one section."""
    counts = _model_families(counter_latencies=False)
    seen = {family.name for family in counts}

    def added_by(**switch: bool) -> list[Family]:
        families = _model_families(**{"counter_latencies": False, **switch})
        return [family for family in families if family.name not in seen]

    plain = _language_model()
    speculative = _language_model(num_speculative_tokens=1)
    with_lora = _language_model(lora=LoraConfig(enable_lora=True))
    transfers = _language_model(kv_address="ipc://kv")
    static = _language_model(in_flight_batching=False)
    vllm = vllm_model()
    common = [f for f in plain.describe() if f in static.describe()]
    return [
        Section("Models", "Always.", counts, {"reason": [reason.value for reason in FailureReason]}),
        Section(
            "Models: durations",
            "Unless `--metrics-config counter_latencies=false`. Cache metrics only for models with `response_cache`.",
            added_by(counter_latencies=True),
        ),
        Section(
            "Models: summaries",
            "`--metrics-config summary_latencies=true`.",
            added_by(summary_latencies=True),
        ),
        Section(
            "Models: time to first response",
            "`--metrics-config histogram_latencies=true`.",
            added_by(histogram_latencies=True),
        ),
        Section(
            "Machine: CPU",
            "Unless `--allow-cpu-metrics=false`. On Linux.",
            list(CPU_FAMILIES),
        ),
        Section(
            "Machine: GPUs",
            "Unless `--allow-gpu-metrics=false`, if there is a GPU. Values that a GPU does not report are omitted.",
            list(GPU_FAMILIES),
        ),
        Section(
            "Machine: pinned memory",
            "Always 0: there is no pinned memory pool.",
            list(PINNED_MEMORY_FAMILIES),
        ),
        Section(
            "Language models (vLLM names)",
            "Models of the backends `llm`, `neso` and `tensorrtllm`; of the backend `vllm` if its parameter "
            "`REPORT_CUSTOM_METRICS` is true.",
            [f for f in common if f in vllm],
            _values(plain),
        ),
        Section(
            "Neso's engine (vLLM names)",
            "Models of the backends `llm`, `neso` and `tensorrtllm`.",
            [f for f in common if f.name.startswith("vllm:") and f not in vllm],
        ),
        Section(
            "Engines of a model",
            "Models of the backends `llm`, `neso`, `embedding` and `tensorrtllm`. `engine` is its number. "
            "The other metrics of a model are sums over its engines.",
            [f for f in common if f.name.startswith(("neso_engine_", "neso_group_"))],
        ),
        Section(
            "Speculative decoding, by position of the draft token",
            "With `speculative`.",
            _new(speculative, plain),
        ),
        Section(
            "Workers of a model", "With `workers` or `worker_address`.", [*CLUSTER_FAMILIES, *WORKER_FAMILIES]
        ),
        Section(
            "Stages",
            "Models of `--stage`.",
            [*STAGE_FAMILIES, *STAGE_WORKER_FAMILIES, *ENGINE_WORKER_FAMILIES],
        ),
        Section(
            "KV transfer",
            "With `kv_transfer`, which workers of the roles prefill and decode have. Sums over the workers.",
            _new(transfers, plain),
            {"reason": FALLBACK_REASONS},
        ),
        Section("LoRA adapters", "With `enable_lora` or `lora_modules`.", _new(with_lora, plain)),
        Section(
            "Language models (TensorRT-LLM names)",
            "Models of the backends `llm`, `neso` and `tensorrtllm`.",
            [f for f in common if f.name.startswith("nv_")],
            _values(plain),
        ),
        Section(
            "In-flight batching", "Unless `gpt_model_type` is `V1`.", _new(plain, static), _values(plain)
        ),
        Section(
            "Processes",
            "Models of the backends `llm`, `neso`, `tensorrtllm` and `vllm`, and Python models in processes.",
            [RESTARTS],
        ),
        Section("Static batching", "With `gpt_model_type: V1`.", _new(static, plain), _values(static)),
    ]


def page() -> str:
    """Return the up-to-date page."""
    return HEAD + "".join(map(_section, sections()))


def _model_families(**switches: bool) -> list[Family]:
    return model_families(MetricsConfig(**switches))


def _language_model(
    *,
    num_speculative_tokens: int = 0,
    lora: LoraConfig | None = None,
    in_flight_batching: bool = True,
    kv_address: str = "",
) -> MetricsRegistry:
    """Return a registry with the metrics of a language model with these options."""
    info = EngineInfo(
        *("native", 2048, 64, 32000, 64, 16, 2**20, 0.5),
        num_speculative_tokens=num_speculative_tokens,
        lora=lora or LoraConfig(),
        in_flight_batching=in_flight_batching,
        kv_address=kv_address,
    )
    registry = MetricsRegistry()
    engine = SimpleNamespace(
        info=info, stats=EngineStats(), alive=True, num_requests=0, on_dead=id, on_stats=id
    )
    group = EngineGroup([cast(AsyncEngine, engine)], EngineConfig(model=""))
    LlmMetrics(ModelMetrics(registry, "model", "1"), group)
    return registry


def vllm_model() -> list[Family]:
    """Return the families of a model of the backend `vllm`."""
    registry = MetricsRegistry()
    VllmMetrics(ModelMetrics(registry, "model", "1"), lambda: 0)
    return registry.describe()


def _new(registry: MetricsRegistry, known: MetricsRegistry) -> list[Family]:
    return [family for family in registry.describe() if family not in known.describe()]


def _values(registry: MetricsRegistry) -> dict[str, list[str]]:
    """Return the values of labels that have several values at startup."""
    found: dict[str, dict[str, None]] = {}
    for metric in registry.collect():
        for sample in metric.samples:
            for label, value in sample.labels.items():
                found.setdefault(label, {})[value] = None
    return {label: list(values) for label, values in found.items() if len(values) > 1 and label != "le"}


def _section(section: Section) -> str:
    rows = "".join(_row(family, section.values) for family in section.families)
    return (
        f"\n## {section.title}\n\n{section.condition}\n\n"
        f"| name | type | unit | labels | help |\n|---|---|---|---|---|\n{rows}"
    )


def _row(family: Family, values: Mapping[str, list[str]]) -> str:
    labels = ", ".join(_label(label, values) for label in sorted(family.labels))
    cells = (f"`{family.name}`", family.kind, _unit(family.name), labels, family.help.rstrip("."))
    return f"| {' | '.join(cells)} |\n"


def _label(label: str, values: Mapping[str, list[str]]) -> str:
    known = values.get(label, ())
    return f"`{label}`" + (f" ({', '.join(f'`{value}`' for value in known)})" if known else "")


def _unit(name: str) -> str:
    """Return the unit of a family, "" for counts."""
    return _UNITS.get(name) or next((unit for end, unit in _ENDINGS.items() if name.endswith(end)), "")


if __name__ == "__main__":
    PAGE.write_text(page())

"""docs/reference/metrics-reference.md lists all metrics; queries of the dashboard and the guide use existing ones."""

from __future__ import annotations

import importlib.util
import json
import re
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from test_llm_backend import outputs, request, write_repository

import neso.server.core
from neso.server.metrics.config import MetricsConfig
from neso.server.options import ServerOptions

ROOT = Path(__file__).parents[3]
DASHBOARD = ROOT / "deploy" / "grafana" / "neso.json"
PARTS = re.compile(r"_(bucket|sum|count)$")
LABEL = re.compile(r'(\w+)="[^"]*"')
PROMQL_NAME = re.compile(r"\b(?:nv_|vllm:)[a-z0-9_]+")


@pytest.fixture(scope="module")
def docs():
    spec = importlib.util.spec_from_file_location("metrics_docs", ROOT / "scripts" / "metrics_docs.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def families(docs):
    listed = [family for section in docs.sections() for family in section.families]
    assert len({family.name for family in listed}) == len(listed) > 70
    return {family.name: family for family in listed}


def test_page_is_up_to_date(docs):
    assert docs.PAGE.read_text() == docs.page(), "run: python scripts/metrics_docs.py"


def test_metrics_of_the_vllm_backend_are_listed(docs, families):
    assert set(docs.vllm_model()) <= set(families.values())


@asynccontextmanager
async def serving(root, **model_json):
    write_repository(root, num_blocks=64, **model_json)
    options = ServerOptions(
        model_repository=(root,),
        backend_config={"llm": {"in-process": "true"}},
        metrics=MetricsConfig(histogram_latencies=True, summary_latencies=True),
    )
    core = neso.server.core.Core(options)
    await core.start()
    assert core.ready(), core.repository_index()
    try:
        yield core
    finally:
        await core.stop()


@pytest.mark.parametrize(
    "model_json",
    [
        {"enable_lora": True, "speculative": "ngram"},
        {"gpt_model_type": "V1"},
    ],
)
async def test_exported_metrics_are_listed(tmp_path, families, model_json):
    async with serving(tmp_path, **model_json) as core:
        await outputs(core, request(parameters={"max_tokens": 5, "ignore_eos": True}))
        text = (await core.render_metrics()).decode()
    exported = {}
    helps = dict(re.findall(r"^# HELP (\S+) (.*)$", text, re.M))
    for name, kind in re.findall(r"^# TYPE (\S+) (.*)$", text, re.M):
        exported[name] = (kind, helps[name])
    assert "vllm:time_to_first_token_seconds" in exported and "nv_inference_request_summary_us" in exported
    assert exported == {
        name: (families[name].kind, families[name].help) for name in exported if name in families
    }
    for name, labels in re.findall(r"^([\w:]+)(?:{(.*)})? \S+$", text, re.M):
        listed = families.get(name) or families[PARTS.sub("", name)]
        assert set(LABEL.findall(labels)) - {"le", "quantile"} == set(listed.labels), name


def expressions(value) -> list[str]:
    """Return all PromQL expressions of a dashboard."""
    if isinstance(value, dict):
        own = [value[key] for key in ("expr", "query") if isinstance(value.get(key), str)]
        return own + [found for item in value.values() for found in expressions(item)]
    return [found for item in value for found in expressions(item)] if isinstance(value, list) else []


def queried(text: str, families) -> dict[str, bool]:
    """Return the metrics named in a text and whether each is listed; histograms by their sample names."""

    def listed(name: str) -> bool:
        base = PARTS.sub("", name)
        of_parts = base != name and base in families and families[base].kind in ("histogram", "summary")
        return of_parts or (name in families and families[name].kind != "histogram")

    return {name: listed(name) for name in PROMQL_NAME.findall(text)}


def unknown_labels(query: str, families) -> set[str]:
    """Return the labels of a query that none of its metrics has."""
    known = {"le", "instance", "job"}
    for name in PROMQL_NAME.findall(query):
        known |= set(families[name if name in families else PARTS.sub("", name)].labels)
    grouped = {label for labels in re.findall(r"by \(([^)]*)\)", query) for label in labels.split(", ")}
    return (grouped | set(re.findall(r"[{,]\s*(\w+)\s*[=!]", query))) - known


def test_dashboard_queries_existing_metrics(families):
    dashboard = json.loads(DASHBOARD.read_text())
    names = queried("\n".join(expressions(dashboard)), families)
    assert len(names) > 20 and all(names.values()), names
    assert not [query for query in expressions(dashboard) if unknown_labels(query, families)]
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = [
        (x, y)
        for place in (panel["gridPos"] for panel in panels)
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(set(cells)) == len(cells) and max(x for x, _ in cells) < 24


def test_guide_queries_existing_metrics(families):
    page = (ROOT / "docs" / "guides" / "metrics.md").read_text()
    queries = "\n".join(re.findall(r"^```promql\n(.*?)^```", page, re.M | re.S))
    names = queried(queries, families)
    assert len(names) > 5 and all(names.values()), names
    assert not [query for query in queries.split("\n\n") if unknown_labels(query, families)]

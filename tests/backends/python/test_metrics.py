"""Custom metrics of Python models."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from core_requests import collect, send_request

HEAD = """
import json
import numpy as np
import triton_python_backend_utils as pb_utils
Family = pb_utils.MetricFamily

def attempt(work):
    try:
        return work()
    except pb_utils.TritonModelException as error:
        return str(error)

def answer(*values):
    return pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array([json.dumps(values)], np.object_))])

class TritonPythonModel:
"""
TENSORS = """
input { name: "IN" data_type: TYPE_FP32 dims: [ -1 ] }
output { name: "OUT" data_type: TYPE_STRING dims: [ -1 ] }
"""


@pytest.fixture
def loaded(serve):
    """`await loaded(code)` loads a model with this code."""

    async def start(code: str):
        return await serve(HEAD + code, TENSORS)

    return start


async def outcome(model) -> str:
    """Return the JSON result of the model."""
    (response,) = await asyncio.wait_for(collect(send_request(model, IN=np.ones(1, np.float32))), 60)
    assert response.error is None, response.error
    return response.output("OUT").strings()[0]


def lines(model, name: str) -> list[str]:
    """Return the lines of a family in /metrics."""
    text = model._backend.context.core.metrics.render().decode()
    return [
        line for line in text.splitlines() if line.startswith((name, f"# HELP {name} ", f"# TYPE {name} "))
    ]


async def test_a_counter_and_a_gauge(loaded):
    model = await loaded("""
    def initialize(self, args):
        self.family = Family(name="requests_total", description="how many", kind=Family.COUNTER)
        self.all = self.family.Metric(labels={"model": "m", "path": 'a"b'})
        self.plain = self.family.Metric()
        self.levels = Family("level_created", "how high", Family.GAUGE)
        self.level = self.levels.Metric(labels={"x": "y"})
    def execute(self, requests):
        self.all.increment(2)
        self.all.increment(0.5)
        self.plain.increment(1)
        self.level.set(7)
        self.level.increment(-3)
        return [answer(self.all.value(), self.plain.value(), self.level.value())]
""")
    assert await outcome(model) == "[2.5, 1.0, 4.0]"
    assert lines(model, "requests_total") == [
        "# HELP requests_total how many",
        "# TYPE requests_total counter",
        'requests_total{model="m",path="a\\"b"} 2.5',
        "requests_total 1",
    ]
    assert 'level_created{x="y"} 4' in lines(model, "level_created")


async def test_a_histogram(loaded):
    model = await loaded("""
    def initialize(self, args):
        self.family = Family(name="took", description="how long", kind=Family.HISTOGRAM)
        self.metric = self.family.Metric(labels={"a": "b"}, buckets=[0.1, 1, 10])
    def execute(self, requests):
        for value in (0.1, 0.5, 5, 50):
            self.metric.observe(value)
        return [answer()]
""")
    await outcome(model)
    assert lines(model, "took")[1:] == [
        "# TYPE took histogram",
        'took_count{a="b"} 4',
        'took_sum{a="b"} 55.6',
        'took_bucket{a="b",le="0.1"} 1',
        'took_bucket{a="b",le="1"} 2',
        'took_bucket{a="b",le="10"} 3',
        'took_bucket{a="b",le="+Inf"} 4',
    ]


@pytest.mark.parametrize(
    ("kind", "call", "message"),
    [
        ("COUNTER", "Metric().increment(-1)", "monotonically"),
        ("COUNTER", "Metric().set(1)", "COUNTER does not support Set"),
        ("COUNTER", "Metric().observe(1)", "does not support Observe"),
        ("COUNTER", "Metric(buckets=[1])", "Unexpected buckets"),
        ("COUNTER", "Metric(labels={'a': 1})", "must be text"),
        ("COUNTER", "Metric(labels=['a'])", "must be a dictionary"),
        ("COUNTER", "Metric(labels={'a-b': 'c'})", "invalid label name 'a-b'"),
        ("GAUGE", "Metric().observe(1)", "GAUGE does not support Observe"),
        ("HISTOGRAM", "Metric()", "Must provide buckets"),
        ("HISTOGRAM", "Metric(buckets=[2, 1])", "monotonically increasing"),
        ("HISTOGRAM", "Metric(buckets=[1, 1])", "monotonically increasing"),
        ("HISTOGRAM", "Metric(buckets=[1]).value()", "HISTOGRAM does not support Value"),
        ("HISTOGRAM", "Metric(buckets=[1]).set(1)", "HISTOGRAM does not support Set"),
        ("HISTOGRAM", "Metric(buckets=[1]).increment(1)", "HISTOGRAM does not support Increment"),
    ],
)
async def test_unsupported_operations_of_metric_kinds(loaded, kind, call, message):
    model = await loaded(f"""
    def execute(self, requests):
        family = Family("it", "", Family.{kind})
        return [answer(attempt(lambda: family.{call}))]
""")
    assert message in await outcome(model)


async def test_families_with_the_same_name_are_shared(loaded):
    model = await loaded("""
    def execute(self, requests):
        first, second = Family("same", "", Family.COUNTER), Family("same", "other", Family.COUNTER)
        one, two = first.Metric(labels={"a": "b"}), second.Metric(labels={"a": "b"})
        one.increment(1)
        two.increment(2)
        return [answer(one.value(), two.value(), attempt(lambda: Family("same", "", Family.GAUGE)))]
""")
    assert (await outcome(model)).startswith("[3.0, 3.0, \"metric family 'same' already exists with kind")


@pytest.mark.parametrize(
    ("family", "message"),
    [
        ("'nv_inference_count', ''", "one of the server's own"),
        ("'a b', ''", "invalid metric name 'a b'"),
        ("'', ''", "invalid metric name"),
        ("'a', '', 7", "unknown kind 7"),
    ],
)
async def test_invalid_families_are_rejected(loaded, family, message):
    model = await loaded(f"""
    def execute(self, requests):
        return [answer(attempt(lambda: Family({family})))]
""")
    assert message in await outcome(model)


async def test_metric_exists_as_long_as_its_family(loaded):
    model = await loaded("""
    step = 0
    def initialize(self, args):
        self.one, self.two = Family("brief", "first", Family.GAUGE), Family("brief", "second", Family.GAUGE)
        self.kept = self.one.Metric({"n": "1"})
        self.one.Metric({"n": "2"}).set(5)
        self.two.Metric({"n": "2"}).increment(1)
    def execute(self, requests):
        if self.step == 0:
            del self.one
        elif self.step == 1:
            del self.two
        self.step += 1
        return [answer(attempt(self.kept.value), attempt(lambda: self.kept.set(1)))]
""")
    assert lines(model, "brief") == [
        "# HELP brief first",
        "# TYPE brief gauge",
        'brief{n="1"} 0',
        'brief{n="2"} 6',
    ]
    message = "Invalid metric operation as the corresponding 'MetricFamily' has been deleted."
    assert (await outcome(model)).count(message) == 2
    assert lines(model, "brief")[2:] == ['brief{n="2"} 6']
    await outcome(model)
    assert lines(model, "brief") == []


async def test_unload_removes_the_metrics_of_a_model(loaded):
    model = await loaded("""
    def initialize(self, args):
        self.family = Family("mine", "", Family.GAUGE)
        self.metric = self.family.Metric()
    def execute(self, requests):
        return [answer()]
""")
    assert lines(model, "mine")
    await model.unload(1)
    assert not lines(model, "mine")


async def test_threads_of_a_model_share_counters(loaded):
    model = await loaded("""
    def execute(self, requests):
        from concurrent.futures import ThreadPoolExecutor
        family = Family("shared", "", Family.COUNTER)
        metric = family.Metric()
        def work():
            own = Family("shared", "", Family.COUNTER)
            mine = own.Metric()
            for _ in range(1000):
                mine.increment(1)
        with ThreadPoolExecutor(4) as pool:
            for future in [pool.submit(work) for _ in range(8)]:
                future.result()
        return [answer(metric.value())]
""")
    assert await outcome(model) == "[8000.0]"

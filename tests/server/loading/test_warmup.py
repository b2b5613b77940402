"""Warmup requests, executed before a model is ready."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import numpy as np
import pytest
from core_requests import collect, send_request

from neso.server.errors import ServerError
from neso.server.metadata import ModelState

# Records its requests, and fails for a negative number.
RECORDER = """
import json
from pathlib import Path
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    seen = []

    def execute(self, requests):
        for request in requests:
            self.seen.append({t.name(): [str(t.as_numpy().dtype), *t.as_numpy().shape] for t in request.inputs()})
            values = request.inputs()[0].as_numpy()
            Path(pb_utils.get_model_dir(), "seen").write_text(json.dumps(self.seen))
            Path(pb_utils.get_model_dir(), "last").write_text(repr(values.tolist()))
            if values.dtype == np.float32 and values.min(initial=0) < 0:
                raise ValueError("too cold")
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.zeros(1, np.float32))]) for _ in requests]
"""
TENSORS = """
input { name: "IN" data_type: TYPE_FP32 dims: [ -1 ] }
output { name: "OUT" data_type: TYPE_FP32 dims: [ -1 ] }
"""


def sample(value: str, extra: str = "", name: str = "it", kind: str = "TYPE_FP32") -> str:
    return f"""
model_warmup {{
  name: "{name}" {extra}
  inputs {{ key: "IN" value {{ data_type: {kind} {value} }} }}
}}
"""


def seen(repository: Any, file: str = "seen") -> Any:
    path = repository.path / "model" / "1" / file
    return json.loads(path.read_text()) if path.exists() else []


async def test_samples_are_executed_before_the_model_is_ready(repository, start_core):
    config = (
        TENSORS
        + sample("dims: [ 4 ] zero_data: true", "count: 3")
        + sample("dims: [ 2 ] random_data: true", name="b")
    )
    repository.add("model", RECORDER, config)
    core = await start_core()
    assert core.ready()
    assert seen(repository) == [{"IN": ["float32", 4]}] * 3 + [{"IN": ["float32", 2]}]
    model = core.model("model")
    statistics = model.statistics.snapshot()
    assert (statistics["inference_count"], statistics["execution_count"], statistics["last_inference"]) == (
        0,
        0,
        0,
    )
    assert statistics["inference_stats"]["success"]["count"] == 0 and not statistics["batch_stats"]
    assert model.in_flight_count == 0
    await collect(send_request(model, IN=np.ones(1, np.float32)))
    assert model.statistics.inference_count == 1


@pytest.mark.parametrize("batcher", ["", "dynamic_batching { max_queue_delay_microseconds: 60000000 }"])
async def test_batches(repository, start_core, batcher):
    config = f"max_batch_size: 8 {batcher} {TENSORS}" + sample("dims: [ 2 ] zero_data: true", "batch_size: 5")
    config += sample("dims: [ 2 ] zero_data: true", name="one")
    repository.add("model", RECORDER, config)
    assert (await start_core()).ready()
    assert seen(repository) == [{"IN": ["float32", 5, 2]}, {"IN": ["float32", 1, 2]}]


async def test_sequence_batching(repository, start_core):
    """Each instance gets its own requests: a shared request would not be executed by any."""
    config = "max_batch_size: 2 sequence_batching { } instance_group { count: 2 }" + TENSORS
    repository.add("model", RECORDER, config + sample("dims: [ 2 ] zero_data: true"))
    assert (await asyncio.wait_for(start_core(), 60)).ready()


SEQUENCES = """
sequence_batching {
  control_input { name: "START" control { kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 1 ] } }
  control_input { name: "ID" control { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_UINT64 } }
  state { input_name: "STATE_IN" output_name: "STATE_OUT" data_type: TYPE_FP32 dims: [ 3 ] }
}
"""


async def test_samples_of_sequence_models_have_control_inputs_and_states(repository, start_core):
    values = sample("dims: [ 2 ] zero_data: true", "batch_size: 2")
    given = 'inputs { key: "START" value { data_type: TYPE_INT32 dims: [ 1 ] random_data: true } } }'
    config = "max_batch_size: 2" + SEQUENCES + TENSORS + values + values.rstrip().removesuffix("}") + given
    repository.add("model", RECORDER, config)
    core = await start_core()
    assert core.ready(), [entry.reason for entry in core.repository_index()]
    expected = {
        "IN": ["float32", 2, 2],
        "START": ["int32", 2, 1],
        "ID": ["uint64", 2, 1],
        "STATE_IN": ["float32", 2, 3],
    }
    assert seen(repository) == [expected, expected]


async def test_data_from_files(repository, start_core):
    config = f"max_batch_size: 2 {TENSORS}" + sample('dims: [ 3 ] input_data_file: "raw"', "batch_size: 2")
    folder = repository.add("model", RECORDER, config)
    (folder / "warmup").mkdir()
    (folder / "warmup" / "raw").write_bytes(np.array([1, 2, 3], "<f4").tobytes())
    assert (await start_core()).ready()
    assert seen(repository, "last") == [[1, 2, 3], [1, 2, 3]]


KINDS = [("BOOL", "bool"), ("INT64", "int64"), ("UINT8", "uint8"), ("FP16", "float16"), ("STRING", "object")]


@pytest.mark.parametrize(
    ("kind", "source", "dtype"),
    [(kind, source, dtype) for kind, dtype in KINDS for source in ("zero_data", "random_data")],
)
async def test_all_data_sources(repository, start_core, kind, source, dtype):
    config = TENSORS.replace("TYPE_FP32", f"TYPE_{kind}", 1)
    config += sample(f"dims: [ 3 ] {source}: true", kind=f"TYPE_{kind}")
    repository.add("model", RECORDER, config)
    assert (await start_core()).ready()
    assert seen(repository) == [{"IN": [dtype, 3]}]
    if kind == "STRING":
        text = (repository.path / "model" / "1" / "last").read_text()
        assert (text == "[b'', b'', b'']") == (source == "zero_data")


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (sample('dims: [ 1 ] input_data_file: "cold"'), "too cold"),
        (
            sample('dims: [ 2 ] input_data_file: "cold"'),
            "input byte size mismatch for input 'IN'. Expected 8, got 4",
        ),
        (sample('dims: [ 1 ] input_data_file: "nope"'), "'nope' of input 'IN': No such file"),
        (sample('dims: [ 1 ] input_data_file: "../config.pbtxt"'), "is not in"),
        (sample("dims: [ 1, 1 ] zero_data: true"), "unexpected shape for input 'IN'"),
        (sample("dims: [ -1 ] zero_data: true"), "must not be negative"),
        (sample("dims: [ 1 ]"), "neither zero_data, random_data nor input_data_file"),
        (sample("dims: [ 1 ] zero_data: true", kind="TYPE_INT8"), "data-type is 'INT8'"),
        (sample("dims: [ 1 ] zero_data: true", "batch_size: 2"), "does not support batching"),
        ('model_warmup { name: "it" }', "expected 1 inputs but got 0"),
    ],
)
async def test_a_failing_warmup_fails_the_load(repository, start_core, config, reason):
    folder = repository.add("model", RECORDER, TENSORS + config)
    (folder / "warmup").mkdir()
    (folder / "warmup" / "cold").write_bytes(np.array([-1], "<f4").tobytes())
    core = await start_core()
    (entry,) = core.repository_index()
    assert entry.state is ModelState.UNAVAILABLE
    assert entry.reason.startswith("failed to run warmup sample 'it': ") and reason in entry.reason
    with pytest.raises(ServerError):
        core.model("model")


async def test_a_reload_with_a_failing_warmup_keeps_the_old_model(repository, start_core):
    repository.add("model", RECORDER, TENSORS)
    core = await start_core(explicit=True, startup_models=("model",))
    before = core.model("model")
    repository.add("model", RECORDER, TENSORS + sample("dims: [ 1 ]"))
    with pytest.raises(ServerError, match="failed to run warmup sample 'it'"):
        await core.load_model("model")
    assert core.model("model") is before and before.ready()

"""Logits processors of served models, chosen by name over every protocol, with the example for LM Format Enforcer."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai
import pytest
from layout_repository import PROMPT, Stream, init, tensors, text
from server_process import ServerProcess

EXAMPLE = Path(__file__).parents[2] / "examples" / "logits_processors" / "trip.py"
OWN = """
import numpy as np

def fails(logits, sequences):
    raise RuntimeError("on purpose")
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A model of the backend `llm` and TensorRT-LLM's layout, whose folders contain the processors."""
    registered = json.dumps({"trip": "trip.py:TripSchema", "fails": "own.py:fails"})
    repository = init(tmp_path_factory.mktemp("repository"), f"--parameter=logits_processors={registered}")
    pilot = repository / "pilot"
    (pilot / "1").mkdir(parents=True)
    (pilot / "config.pbtxt").write_text('backend: "llm"')
    (pilot / "1" / "model.json").write_text(f'{{"model": "neso-pilot", "logits_processors": {registered}}}')
    for folder in (pilot / "1", repository / "tensorrt_llm" / "1"):
        shutil.copy(EXAMPLE, folder)
        (folder / "own.py").write_text(OWN)
    with ServerProcess(f"--model-repository={repository}") as server:
        assert server.ports, server.output
        yield server


def check(answer: str) -> None:
    trip = json.loads(answer)
    assert trip["city"] in ("Paris", "Rome", "Oslo") and trip["by_train"] in (True, False) and len(trip) == 2


def test_generate(server):
    parameters = {"max_tokens": 100, "temperature": 0, "logits_processor": "trip"}
    body = {"text_input": PROMPT, "parameters": parameters}
    status, answer = server.post("/v2/models/pilot/generate", body)
    assert status == 200
    check(answer["text_output"])
    parameters["logits_post_processor_name"] = parameters.pop("logits_processor")
    assert server.post("/v2/models/pilot/generate", body) == (200, answer)


@pytest.mark.parametrize("model", ["ensemble", "tensorrt_llm_bls"])
def test_trtllm_chains(server, model):
    body = {
        "text_input": PROMPT,
        "max_tokens": 100,
        "exclude_input_in_output": True,
        "logits_post_processor_name": "trip",
    }
    status, answer = server.post(f"/v2/models/{model}/generate", body)
    assert status == 200, answer
    check(answer["text_output"])


def test_kserve_grpc(server):
    given = tensors(None, text_input=PROMPT)
    parameters = {"logits_processor": "trip", "max_tokens": 100, "temperature": "0"}
    stream = Stream(server.address("grpc"), "pilot", given, parameters=parameters)
    check(text(stream.all()))


@pytest.mark.parametrize("model", ["pilot", "ensemble"])
def test_openai(server, model):
    client = openai.OpenAI(base_url=server.url("/v1", "openai"), api_key="none")
    answer = client.completions.create(
        model=model, prompt=PROMPT, max_tokens=100, temperature=0, extra_body={"logits_processor": "trip"}
    )
    check(answer.choices[0].text)


def test_other_requests_continue_when_it_fails(server):
    def ask(name: str) -> tuple[int, dict[str, str]]:
        parameters = {"max_tokens": 60, "temperature": 0, "logits_processor": name}
        return server.post("/v2/models/pilot/generate", {"text_input": PROMPT, "parameters": parameters})

    with ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(ask, ["trip", "fails"] * 3))
    for status, answer in answers[::2]:
        assert status == 200
        check(answer["text_output"])
    for status, answer in answers[1::2]:
        assert status == 500 and "the logits processor 'fails' failed: on purpose" in answer["error"]
    metrics = server.metrics()

    def counter(name: str, processor: str) -> float:
        (value,) = (
            value
            for key, value in metrics.items()
            if key.startswith(f"neso_logits_processor_{name}_total{{")
            and 'model="pilot"' in key
            and f'processor="{processor}"' in key
        )
        return value

    assert counter("failures", "fails") == 3
    assert counter("rows", "trip") > 10 and counter("seconds", "trip") > 0


def test_unknown_name(server):
    parameters = {"max_tokens": 5, "logits_processor": "upper"}
    status, answer = server.post(
        "/v2/models/pilot/generate", {"text_input": PROMPT, "parameters": parameters}
    )
    assert (
        status == 400
        and "'upper' is not registered with the model; registered: trip, fails" in answer["error"]
    )


def test_vllms_parameter_names_the_alternative(server):
    body = {"model": "pilot", "prompt": "a", "logits_processors": ["x.y"]}
    status, answer = server.post("/v1/completions", body, "openai")
    assert status == 400 and "use 'logits_processor'" in answer["error"]["message"]


def test_command_line():
    """The command in the example's README, in its folder."""
    registered = {"trip": f"{EXAMPLE}:TripSchema"}
    flag = f"--engine-config=logits_processors={json.dumps(registered)}"
    with ServerProcess("neso-pilot", flag) as server:
        assert server.ports, server.output
        body = {"model": "neso-pilot", "prompt": PROMPT, "logits_processor": "trip", "max_tokens": 100}
        status, answer = server.post("/v1/completions", body, "openai")
        assert status == 200
        check(answer["choices"][0]["text"])


def test_a_missing_file_fails_the_load(tmp_path):
    with ServerProcess("neso-pilot", '--engine-config=logits_processors={"a": "absent.py:run"}') as server:
        assert "logits processor 'a'" in server.output and "absent.py" in server.output

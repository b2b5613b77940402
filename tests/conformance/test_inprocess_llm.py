"""The in-process API with a language model, with Triton's names."""

from __future__ import annotations

import asyncio
import json

import pytest

import neso
from neso.generation import SamplingParams

QUESTION = "What is in-flight batching?"


@pytest.fixture(scope="module")
def inprocess(tmp_path_factory):
    repository = tmp_path_factory.mktemp("repository")
    (repository / "pilot" / "1").mkdir(parents=True)
    (repository / "pilot" / "config.pbtxt").write_text('backend: "neso"')
    (repository / "pilot" / "1" / "model.json").write_text(json.dumps({"model": "neso-pilot"}))
    with neso.Server(model_repository=str(repository)) as server:
        yield server


@pytest.fixture(scope="module")
def expected(llm):
    params = SamplingParams(temperature=0.0)
    return llm.generate(QUESTION, params, progress=False)[0].text


def test_iterator_fills_while_the_caller_is_busy(inprocess, expected):
    model = inprocess.model("pilot")
    responses = model.infer(
        inputs={"text_input": [QUESTION], "stream": [True]}, parameters={"temperature": 0.0}
    )
    pieces = [response.outputs["text_output"].to_string_array()[0] for response in responses]
    assert len(pieces) > 5 and "".join(pieces) == expected


def test_from_another_event_loop(inprocess, expected):
    async def send_request() -> str:
        text = ""
        inputs = {"text_input": [QUESTION], "stream": [True]}
        async for response in inprocess.model("pilot").async_infer(
            inputs=inputs, parameters={"temperature": 0.0}
        ):
            text += response.outputs["text_output"].to_string_array()[0]
        return text

    async def run() -> list[str]:
        return await asyncio.gather(*(send_request() for _ in range(4)))

    assert asyncio.run(run()) == [expected] * 4


def test_cancel(inprocess):
    parameters = {"ignore_eos": True, "max_tokens": 1500}
    responses = inprocess.model("pilot").infer(
        inputs={"text_input": [QUESTION], "stream": [True]}, parameters=parameters
    )
    next(responses)
    responses.cancel()
    with pytest.raises(Exception, match="cancelled"):
        for _ in responses:
            pass

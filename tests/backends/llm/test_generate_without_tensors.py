"""Generate requests of a language model: the path without tensors gives the JSON of the path with tensors."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import orjson
import pytest

from neso.frontends.kserve.generate import (
    _read_text_values,
    read_generate_request,
    write_generate_response,
)
from neso.server.core import Core
from neso.server.inference_request import InferenceRequest
from neso.server.options import ModelControlMode, ServerOptions

PROMPT = "def add(a, b):"
GREEDY = {"temperature": 0, "max_tokens": 6}


@pytest.fixture
async def core(tmp_path: Path) -> AsyncIterator[Core]:
    (tmp_path / "pilot" / "1").mkdir(parents=True)
    (tmp_path / "pilot" / "config.pbtxt").write_text('backend: "llm"')
    (tmp_path / "pilot" / "1" / "model.json").write_text('{"model": "neso-pilot", "num_blocks": 256}')
    options = ServerOptions(
        model_repository=(tmp_path,),
        model_control_mode=ModelControlMode.EXPLICIT,
        startup_models=("*",),
        backend_config={"llm": {"in-process": "true"}},
    )
    core = Core(options)
    await core.start()
    yield core
    await core.stop()


async def with_tensors(core: Core, body: dict[str, Any]) -> list[dict[str, Any]]:
    model = core.model("pilot")
    request = read_generate_request(orjson.dumps(body), model, "")
    responses = [response async for response in model.submit(request) if not response.flag_only]
    return [orjson.loads(write_generate_response(response)) for response in responses]


async def without_tensors(core: Core, body: dict[str, Any]) -> list[dict[str, Any]] | None:
    """Return None if the request needs tensors."""
    model = core.model("pilot")
    request = InferenceRequest(model.name, {})
    values = _read_text_values(body, model, request)
    fields_of = None if values is None else model.read_text_request(request, values)
    if fields_of is None:
        return None
    responses = [response async for response in model.submit(request) if not response.flag_only]
    assert not any(response.outputs for response in responses)
    return [orjson.loads(write_generate_response(response, fields_of)) for response in responses]


BODIES: list[dict[str, Any]] = [
    {"text_input": PROMPT, **GREEDY},
    {"text_input": PROMPT, "parameters": {**GREEDY, "stream": True}},
    {"text_input": PROMPT, "id": "one", "stream": True, "exclude_input_in_output": False, **GREEDY},
    {"text_input": PROMPT, "n": 2, "seed": 3, "max_tokens": 4, "temperature": 1.0},
    {"text_input": PROMPT, "sampling_parameters": '{"temperature": 0, "max_tokens": 3}'},
    {
        "text_input": PROMPT,
        "return_finish_reason": True,
        "return_num_input_tokens": True,
        "return_num_output_tokens": True,
        "return_logprobs": True,
        **GREEDY,
    },
    {"text_input": PROMPT, "parameters": {"max_tokens": 2}, "max_tokens": 5, "temperature": 0},
]


async def test_same_json_without_tensors(core: Core) -> None:
    for body in BODIES:
        answers = await without_tensors(core, body)
        assert answers is not None, body
        assert answers == await with_tensors(core, body)


NEED_TENSORS: list[dict[str, Any]] = [
    {"text_input": 5},
    {"text_input": ["a", "b"]},
    {"text_input": "\ud800"},
    {"return_cumulative_logprob": True},
    {"prompt_embeds": [1.0]},
    {"stream": 1},
    {"parameters": 3},
    {"priority": -1},
    {"sampling_parameters": "[]"},
    {"max_tokens": "many"},
    {"draft_input_ids": [1]},
]


async def test_requests_with_arrays_or_errors_use_tensors(core: Core) -> None:
    for change in NEED_TENSORS:
        assert await without_tensors(core, {"text_input": PROMPT, **GREEDY, **change}) is None, change


async def test_invalid_parameters_of_the_model_count_as_rejected(core: Core) -> None:
    model = core.model("pilot")
    rejected = dict(model.statistics.failures)
    long = "x " * 100_000
    request = InferenceRequest(model.name, {})
    assert model.read_text_request(request, {"text_input": long}) is not None
    (response,) = [response async for response in model.submit(request)]
    assert response.error is not None and "tokens long" in response.error.message
    changed = {
        reason.value for reason, count in model.statistics.failures.items() if count != rejected[reason]
    }
    assert changed == {"REJECTED"}

"""Sampling defaults from a checkpoint's generation_config.json, with real servers and the `openai` client."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from server_process import ServerProcess

from neso.models import SHIPPED_MODELS

MODEL = "pilot"
QUESTION = [{"role": "user", "content": "Tell me a story."}]
HOT: dict[str, Any] = {"temperature": 5.0, "extra_body": {"top_k": 0}}
SEEDS = range(4)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled model with greedy sampling as its default."""
    directory = tmp_path_factory.mktemp("checkpoint") / MODEL
    shutil.copytree(SHIPPED_MODELS["neso-pilot"], directory)
    file = directory / "generation_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "top_k": 1, "max_new_tokens": 5}))
    return directory


@pytest.fixture(scope="module")
def server(checkpoint: Path) -> Iterator[ServerProcess]:
    with ServerProcess(checkpoint) as process:
        assert process.ports, process.output
        yield process


@pytest.fixture(scope="module")
def other(checkpoint: Path) -> Iterator[ServerProcess]:
    """A server with defaults from an option; the file is ignored."""
    override = json.dumps({"max_new_tokens": 12, "temperature": 5.0})
    with ServerProcess(
        checkpoint, "--generation-config=vllm", f"--override-generation-config={override}"
    ) as process:
        assert process.ports, process.output
        yield process


def client(server: ServerProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url("/v1", "openai"), api_key="none", max_retries=0)


def chat(server: ServerProcess, **fields: Any) -> Any:
    return client(server).chat.completions.create(model=MODEL, messages=QUESTION, **fields)


def texts(server: ServerProcess, **fields: Any) -> dict[str, set[str]]:
    """Return the text of each route, with several seeds."""
    api = client(server)
    choice = {name: value for name, value in fields.items() if name != "max_tokens"}
    return {
        "chat": {chat(server, seed=seed, **fields).choices[0].message.content for seed in SEEDS},
        "completion": {
            api.completions.create(model=MODEL, prompt="A server", seed=seed, **fields).choices[0].text
            for seed in SEEDS
        },
        "response": {
            api.responses.create(
                model=MODEL,
                input="Tell me a story.",
                max_output_tokens=fields.get("max_tokens"),
                **{**choice, "extra_body": {**choice.get("extra_body", {}), "seed": seed}},
            ).output_text
            for seed in SEEDS
        },
    }


def test_requests_use_the_file_defaults(server):
    sampled = texts(server, max_tokens=8)
    assert sampled == texts(server, max_tokens=8, temperature=0)
    assert all(len(found) == 1 for found in sampled.values())


def test_request_values_override_the_file(server):
    assert all(len(found) > 1 for found in texts(server, max_tokens=8, **HOT).values())


def test_file_max_tokens_applies_to_chats_without_a_limit(server):
    assert chat(server).usage.completion_tokens == 5
    ignore = {"ignore_eos": True}
    assert chat(server, max_tokens=9, extra_body=ignore).usage.completion_tokens == 9
    completion = client(server).completions.create(model=MODEL, prompt="A server", extra_body=ignore)
    assert completion.usage.completion_tokens == 16


def test_tensor_requests_ignore_the_file(server):
    path, found = f"/v2/models/{MODEL}/generate", set()
    for seed in SEEDS:
        parameters = {"seed": seed, "temperature": 5.0, "max_tokens": 8}
        status, response = server.post(path, {"text_input": "A server", "parameters": parameters})
        assert status == 200, response
        found.add(response["text_output"])
    assert len(found) > 1


def test_log_names_the_defaults(server, other):
    message = (
        "model 'pilot': default sampling parameters for OpenAI: top_k 1, max_new_tokens 5, from the "
        "checkpoint's generation_config.json (disable with generation_config 'vllm')"
    )
    assert message in server.output
    assert (
        "temperature 5.0, max_new_tokens 12 at most, from override_generation_config (disable" in other.output
    )


def test_without_the_file(other):
    assert all(len(found) > 1 for found in texts(other, max_tokens=8).values())
    assert all(len(found) == 1 for found in texts(other, max_tokens=8, temperature=0).values())


def test_override_max_tokens_limits_all_requests(other):
    for fields in ({}, {"max_tokens": 40}):
        response = chat(other, **fields, extra_body={"ignore_eos": True})
        assert (response.usage.completion_tokens, response.choices[0].finish_reason) == (12, "length")
    completion = client(other).completions.create(
        model=MODEL, prompt="A server", max_tokens=40, extra_body={"ignore_eos": True}
    )
    assert completion.usage.completion_tokens == 12


def test_invalid_file_fails_the_start(tmp_path):
    (tmp_path / "generation_config.json").write_text('{"temperature": "warm"}')
    with ServerProcess(f"--generation-config={tmp_path}") as process:
        assert process.process.wait(30) == 1
    assert "generation_config.json: temperature: Expected `float`, got `str`: 'warm'" in process.output

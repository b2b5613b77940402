"""Summary printed when the server is ready."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from neso.cli.server_process import show_ready


def model(
    name: str, inputs: dict[str, bool], outputs: set[str], backend: str = "", platform: str = ""
) -> Any:
    """`inputs` maps names to whether they are optional."""
    specs = {name: SimpleNamespace(optional=optional) for name, optional in inputs.items()}
    return SimpleNamespace(
        name=name,
        version="1",
        config=SimpleNamespace(backend=backend, platform=platform),
        signature=SimpleNamespace(inputs=specs, outputs=dict.fromkeys(outputs)),
    )


def shown(capsys: pytest.CaptureFixture[str], *models: Any) -> str:
    core: Any = SimpleNamespace(models=lambda: list(models), repository_index=list)
    show_ready(core, {"http": 8000}, 1.0, dashboard=True)
    return capsys.readouterr().out


ENSEMBLE = model(
    "ensemble",
    {"text_input": False, "max_tokens": False, "stream": True},
    {"text_output"},
    platform="ensemble",
)
TOKENS = model("tensorrt_llm", {"input_ids": False}, {"output_ids"}, backend="tensorrtllm")


def test_ensemble_shows_its_platform(capsys):
    text = shown(capsys, ENSEMBLE, TOKENS)
    assert "ensemble  (version 1, platform ensemble)" in text
    assert "tensorrt_llm  (version 1, backend tensorrtllm)" in text


def test_address_of_the_dashboard(capsys):
    assert "  http://localhost:8000   dashboard" in shown(capsys, TOKENS)
    core: Any = SimpleNamespace(models=list, repository_index=list)
    for ports, dashboard in (({"http": 8000}, False), ({"openai": 9000}, True)):
        show_ready(core, ports, 1.0, dashboard)
        assert "dashboard" not in capsys.readouterr().out


def test_example_request_has_the_required_inputs(capsys):
    assert (
        '/models/ensemble/generate -d \'{"text_input": "What is in-flight batching?", "max_tokens": 32}\''
        in (shown(capsys, TOKENS, ENSEMBLE))
    )
    pilot = model("pilot", {"text_input": False, "stream": True}, {"text_output"}, backend="neso")
    assert '"parameters": {"temperature": 0}}' in shown(capsys, pilot)


def test_example_without_a_text_model_queries_the_server(capsys):
    more = model("two", {"text_input": False, "other": False}, {"text_output"}, backend="python")
    vectors = model("embedder", {"text_input": False}, {"embedding"}, backend="embedding")
    assert "  curl localhost:8000/v2\n" in shown(capsys, TOKENS, more, vectors)

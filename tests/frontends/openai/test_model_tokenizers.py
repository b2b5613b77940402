"""Tokenizers of models with text tensors."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tritonclient.grpc.model_config_pb2 import ModelConfig

from neso.engine.text import chat_template
from neso.frontends.openai.model_tokenizers import MISSING_TOKENIZER, ChatTemplateOverride, ModelTokenizers
from neso.frontends.openai.tensor_models.language_model import UNLIMITED_LENGTH
from neso.generation import InvalidParameter
from neso.models import SHIPPED_MODELS
from neso.server.errors import NotFound

PILOT = SHIPPED_MODELS["neso-pilot"]


class FakeModel:
    """The used attributes of a `Model`."""

    def __init__(self, name: str, directory: Path, steps: tuple[str, ...] = (), **parameters: str) -> None:
        self.name, self.directory, self.language_model = name, directory, None
        self.config = ModelConfig(name=name)
        for key, value in parameters.items():
            self.config.parameters[key].string_value = value
        for step in steps:
            self.config.ensemble_scheduling.step.add(model_name=step)


class FakeCore:
    def __init__(self, *models: FakeModel) -> None:
        self._models = {model.name: model for model in models}

    def model(self, name: str) -> FakeModel:
        if name not in self._models:
            raise NotFound(name)
        return self._models[name]


def texts(*models: FakeModel, default: Any = None) -> ModelTokenizers:
    return ModelTokenizers(FakeCore(*models), default)  # type: ignore[arg-type]


async def test_relative_tokenizer_dir(tmp_path: Path) -> None:
    shutil.copytree(PILOT, tmp_path / "tokenizer")
    model = FakeModel("a", tmp_path, tokenizer_dir="tokenizer", max_seq_len="99")
    found = texts(model)
    tokenizer = await found.find(model)
    assert tokenizer is not None and tokenizer.encode("hello")
    assert await found.find(model) is tokenizer
    assert found.max_model_len(model) == 99


async def test_tokenizer_of_a_called_model(tmp_path: Path) -> None:
    first = FakeModel("preprocessing", tmp_path, tokenizer_dir=str(PILOT))
    template = FakeModel("template", tmp_path, tokenizer_dir="${tokenizer_dir}")
    ensemble = FakeModel("ensemble", tmp_path, ("missing", "template", "preprocessing"))
    bls = FakeModel("bls", tmp_path, tensorrt_llm_model_name="ensemble")
    found = texts(first, template, ensemble, bls)
    assert await found.find(ensemble) is not None
    assert await found.find(bls) is not None
    assert await found.find(template) is None
    assert found.max_model_len(bls) == UNLIMITED_LENGTH


async def test_recursive_models(tmp_path: Path) -> None:
    one = FakeModel("one", tmp_path, tensorrt_llm_model_name="two")
    two = FakeModel("two", tmp_path, tensorrt_llm_model_name="one")
    assert await texts(one, two).find(one) is None
    assert texts(one, two).max_model_len(one) == UNLIMITED_LENGTH


async def test_unreadable_tokenizer_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = FakeModel("a", tmp_path, tokenizer_dir=str(tmp_path))
    default = object()
    found = texts(model, default=default)
    with caplog.at_level(logging.ERROR):
        assert [await found.find(model) for _ in range(3)] == [default] * 3
    assert len(caplog.records) == 1
    assert "tokenizer.json is missing" in caplog.text


MESSAGES = [{"role": "user", "content": "hi"}]


def test_template_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    def make_environment() -> Any:
        made.append(1)
        return real()

    real = chat_template.make_environment
    monkeypatch.setattr(chat_template, "make_environment", make_environment)
    source = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}{# compiled once #}"
    prompts = [
        ChatTemplateOverride(_tools(bos), source).apply_chat_template(MESSAGES) for bos in ("<s>", "<s>", "^")
    ]
    assert prompts == ["<s>hi", "<s>hi", "^hi"]
    assert len(made) == 2


def test_missing_tokenizer_rejects_token_ids() -> None:
    for send_request in (lambda: MISSING_TOKENIZER.encode("a"), lambda: MISSING_TOKENIZER.decode([1])):
        with pytest.raises(InvalidParameter, match="no tokenizer is known") as refused:
            send_request()
        assert refused.value.field == "model"
    assert (
        ChatTemplateOverride(MISSING_TOKENIZER, "{{ messages[0].content }}").apply_chat_template(MESSAGES)
        == "hi"
    )


def _tools(bos_token: str) -> Any:
    return SimpleNamespace(special_tokens=SimpleNamespace(texts={"bos_token": bos_token}))

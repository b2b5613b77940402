"""Sampling defaults of a model: sources, overrides, errors."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from neso.engine.client.llm import LLM
from neso.engine.config import EngineConfig
from neso.engine.errors import EngineError
from neso.engine.load.loader import read_default_sampling
from neso.engine.weights.source import CheckpointError
from neso.generation import SamplingDefaults, SamplingParams


def directory(path: Path, **values: Any) -> Path:
    path.mkdir(exist_ok=True)
    (path / "generation_config.json").write_text(json.dumps(values))
    return path


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return directory(tmp_path / "model", top_k=20, temperature=0.6, max_new_tokens=99, eos_token_id=1)


def read(model: Path, **options: Any) -> SamplingDefaults:
    return read_default_sampling(EngineConfig.from_options(str(model), options))


def test_file_of_the_checkpoint(model):
    assert read(model) == SamplingDefaults(top_k=20, temperature=0.6, max_new_tokens=99)


def test_no_file(model, tmp_path):
    assert read(model, generation_config="vllm") == SamplingDefaults()
    assert read(tmp_path) == SamplingDefaults()
    (tmp_path / "model.gguf").touch()
    assert read(tmp_path / "model.gguf") == SamplingDefaults()


@pytest.mark.parametrize("name", ["", "generation_config.json"])
def test_max_new_tokens_of_another_file_is_a_limit(model, tmp_path, name):
    other = directory(tmp_path / "other", top_p=0.5, max_new_tokens=7)
    expected = SamplingDefaults(top_p=0.5, max_new_tokens=7, limits_tokens=True)
    assert read(model, generation_config=str(other / name)) == expected


@pytest.mark.parametrize("as_text", [False, True])
def test_the_override_takes_precedence(model, as_text):
    def override(**values: Any) -> Any:
        return json.dumps(values) if as_text else values

    changed = read(model, override_generation_config=override(top_k=None, min_p=0.1, temperature=1))
    assert changed == SamplingDefaults(temperature=1.0, min_p=0.1, max_new_tokens=99)
    limited = read(model, override_generation_config=override(max_new_tokens=5))
    assert limited == SamplingDefaults(top_k=20, temperature=0.6, max_new_tokens=5, limits_tokens=True)
    alone = read(model, generation_config="vllm", override_generation_config=override(top_k=3))
    assert alone == SamplingDefaults(top_k=3)


@pytest.mark.parametrize(
    ("values", "override", "message"),
    [
        ({"top_k": "many"}, {}, "generation_config.json: top_k: Expected `int`"),
        ({"top_p": 2}, {"top_k": 1}, "generation_config.json: top_p: must be"),
        ({}, {"top_p": 2}, "override_generation_config: top_p: must be"),
        ({}, {"topk": 2}, "override_generation_config: unknown parameter 'topk', known are temper"),
    ],
)
def test_errors_name_the_file_and_the_field(model, values, override, message):
    directory(model, **values)
    with pytest.raises(CheckpointError) as caught:
        read(model, override_generation_config=override)
    assert message in str(caught.value)


def test_missing_file(model, tmp_path):
    with pytest.raises(CheckpointError, match=r"generation_config: .*: there is no such file"):
        read(model, generation_config=str(tmp_path))
    with pytest.raises(CheckpointError, match=r"generation_config: .*nowhere: there is no such directory"):
        read(model, generation_config=str(tmp_path / "nowhere"))


def test_llm_uses_the_defaults(llama_checkpoint, tmp_path):
    checkpoint = shutil.copytree(llama_checkpoint, tmp_path / "copy")
    directory(checkpoint, top_k=1, max_new_tokens=6, eos_token_id=1)
    llm = LLM(checkpoint, runner="reference")
    assert llm.get_default_sampling_params() == SamplingParams(top_k=1, max_tokens=6)
    greedy = SamplingParams(temperature=0, max_tokens=6)
    ids = [
        llm.generate("The quick", params, progress=False)[0].outputs[0].token_ids for params in (None, greedy)
    ]
    assert ids[0] == ids[1] and len(ids[0]) == 6
    (checkpoint / "generation_config.json").write_text('{"top_k": 1.5}')
    with pytest.raises(EngineError, match=r"copy/generation_config.json: top_k: Expected `int`, got `float`"):
        LLM(checkpoint, runner="reference")

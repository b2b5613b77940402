"""A GGUF file as a model, from its path to generated text."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
from checkpoints import CHAT_TEMPLATE
from gguf import GGMLQuantizationType as Type
from gguf_files import convert

from neso.backends.llm.engine_options import engine_config
from neso.engine.client.llm import LLM
from neso.engine.errors import EngineError
from neso.engine.weights.hub import ModelNotFound, resolve_model
from neso.generation import SamplingParams

Factory = Callable[..., Path]

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
PROMPTS = ["The quick", "A server answers requests, and", "def add("]


@pytest.mark.parametrize("arch", ["llama", "mistral", "qwen2", "qwen3", "mixtral"])
def test_generates_the_same_as_the_checkpoint(checkpoint_factory: Factory, tmp_path: Path, arch: str) -> None:
    checkpoint = checkpoint_factory(arch)
    path = convert(checkpoint, tmp_path / "model.gguf", tokenizer={"template": CHAT_TEMPLATE})
    ours, theirs = LLM(path, runner="reference"), LLM(checkpoint, runner="reference")
    for mine, other in zip(
        ours.generate(PROMPTS, GREEDY, progress=False),
        theirs.generate(PROMPTS, GREEDY, progress=False),
        strict=True,
    ):
        assert mine.prompt_token_ids == other.prompt_token_ids
        assert mine.outputs[0].token_ids == other.outputs[0].token_ids
        assert mine.text == other.text
    messages = [{"role": "user", "content": "Hello"}]
    assert ours.chat(messages, GREEDY).text == theirs.chat(messages, GREEDY).text
    assert ours.tokenizer.eos_token_ids == theirs.tokenizer.eos_token_ids


def test_quantized_model_generates(checkpoint_factory: Factory, tmp_path: Path) -> None:
    checkpoint = checkpoint_factory("llama", hidden_size=64, intermediate_size=96)
    llm = LLM(convert(checkpoint, tmp_path / "q.gguf", lambda name: Type.Q8_0))
    (result,) = llm.generate("The quick", GREEDY, progress=False)
    assert len(result.outputs[0].token_ids) == 24


def test_quantized_experts_generate(checkpoint_factory: Factory, tmp_path: Path) -> None:
    checkpoint = checkpoint_factory("mixtral", hidden_size=64, intermediate_size=96)
    path = convert(checkpoint, tmp_path / "q.gguf", lambda name: Type.Q8_0)
    answers = [
        LLM(path, runner=runner, num_threads=1).generate("The quick", GREEDY, progress=False)[0]
        for runner in ("reference", "native")
    ]
    assert answers[0].outputs[0].token_ids[:8] == answers[1].outputs[0].token_ids[:8]


def test_unsupported_file_gives_a_reason(llama_checkpoint: Path, tmp_path: Path) -> None:
    path = convert(
        llama_checkpoint, tmp_path / "m.gguf", edit=lambda w, a: w.add_uint32(f"{a}.expert_group_count", 8)
    )
    with pytest.raises(EngineError, match=r"m\.gguf.*expert_group_count"):
        LLM(path)


def test_paths(llama_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: pytest.fail("looked up"))
    path = tmp_path / "one.gguf"
    path.touch()
    assert resolve_model(path) == resolve_model(str(path)) == path
    assert resolve_model(tmp_path) == path, "a directory that holds it and no safetensors"
    monkeypatch.chdir(tmp_path)
    assert resolve_model("one.gguf") == Path("one.gguf")
    with pytest.raises(ModelNotFound, match=r"two\.gguf: there is no such file"):
        resolve_model("two.gguf")
    (tmp_path / "two.gguf").touch()
    with pytest.raises(ModelNotFound, match=r"several GGUF files, name one: one\.gguf, two\.gguf"):
        resolve_model(tmp_path)


def test_safetensors_take_precedence_over_gguf(llama_checkpoint: Path, tmp_path: Path) -> None:
    both = shutil.copytree(llama_checkpoint, tmp_path / "both")
    (both / "model.gguf").touch()
    assert resolve_model(both) == both


def test_relative_to_the_version_directory_of_a_repository(tmp_path: Path) -> None:
    """As `model` in model.json, and as the only file of the directory."""
    (tmp_path / "m.gguf").touch()
    config = SimpleNamespace(parameters={"model": SimpleNamespace(string_value="m.gguf")})
    for given in (config, SimpleNamespace(parameters={})):
        assert engine_config(given, tmp_path).model == str(tmp_path / "m.gguf")

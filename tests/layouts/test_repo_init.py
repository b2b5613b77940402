"""`neso repo init`: the files it writes and the arguments it rejects."""

from __future__ import annotations

from pathlib import Path

import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2 as pb
from typer.testing import CliRunner, Result

from neso.cli.main import app
from neso.layouts import pbtxt

TRTLLM_MODELS = {"preprocessing", "tensorrt_llm", "postprocessing", "ensemble", "tensorrt_llm_bls"}


def init(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["repo", "init", *map(str, arguments)])


def configs(repository: Path) -> dict[str, pb.ModelConfig]:
    return {
        path.parent.name: text_format.Parse(path.read_text(), pb.ModelConfig())
        for path in repository.glob("*/config.pbtxt")
    }


def parameters(config: pb.ModelConfig) -> dict[str, str]:
    return {name: value.string_value for name, value in config.parameters.items()}


def test_trtllm_layout_has_five_models(tmp_path):
    result = init("--model", "neso-pilot", tmp_path / "models")
    assert result.exit_code == 0 and "neso serve --model-repository=" in result.output
    found = configs(tmp_path / "models")
    assert found.keys() == TRTLLM_MODELS
    assert all(config.name == name and config.max_batch_size == 64 for name, config in found.items())
    assert all((tmp_path / "models" / name / "1").is_dir() for name in TRTLLM_MODELS)
    for name in ("tensorrt_llm", "ensemble", "tensorrt_llm_bls"):
        assert found[name].model_transaction_policy.decoupled
    assert found["tensorrt_llm"].backend == "tensorrtllm"
    assert parameters(found["tensorrt_llm"])["gpt_model_path"] == "neso-pilot"
    assert parameters(found["preprocessing"])["tokenizer_dir"] == "neso-pilot"


def test_ensemble_maps_match_the_tensors_of_the_steps(tmp_path):
    init("--model", "neso-pilot", tmp_path)
    found = configs(tmp_path)
    known = {tensor.name for tensor in found["ensemble"].input}
    for step in found["ensemble"].ensemble_scheduling.step:
        model = found[step.model_name]
        assert set(step.input_map) <= {tensor.name for tensor in model.input}
        assert set(step.output_map) <= {tensor.name for tensor in model.output}
        assert {tensor.name for tensor in model.input if not tensor.optional} <= set(step.input_map)
        assert set(step.input_map.values()) <= known
        known |= set(step.output_map.values())
    assert {tensor.name for tensor in found["ensemble"].output} <= known
    more = {"num_draft_tokens", "use_draft_logits"}
    ensemble, bls = (
        {tensor.name for tensor in found[name].input} for name in ("ensemble", "tensorrt_llm_bls")
    )
    assert bls == ensemble | more


def test_bls_tensor_maps_match_the_ensemble(tmp_path):
    init("--model", "neso-pilot", tmp_path)
    found = configs(tmp_path)
    before, generation, _ = found["ensemble"].ensemble_scheduling.step
    names: dict = {}
    text = (tmp_path / "tensorrt_llm_bls" / "1" / "pipeline.py").read_text()
    exec(text[text.index("TO_PREPROCESSING") : text.index("class Pipeline")], names)  # without the imports
    assert names["TO_PREPROCESSING"] == {source: target for target, source in before.input_map.items()}
    made = {tensor: output for output, tensor in before.output_map.items()}
    from_preprocessing = {made[t]: name for name, t in generation.input_map.items() if t in made}
    assert names["FROM_PREPROCESSING"] == from_preprocessing
    renamed = {t: name for name, t in generation.input_map.items() if t not in made and t != name}
    # length_penalty is renamed, because configurations of TensorRT-LLM's template only have the other name.
    assert names["RENAMED"] == renamed | {"length_penalty": "len_penalty"}


def test_options_are_written_to_the_configurations(tmp_path):
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    options = ["--no-decoupled", "--max-batch-size=0", "--instances=3", "--max-beam-width=4"]
    options += ["--batch-scheduler-policy=guaranteed_no_evict", "--kv-cache-tokens=4096"]
    options += ["--kv-cache-free-gpu-mem-fraction=0.5", "--no-enable-chunked-context", "--accumulate-tokens"]
    options += ["--exclude-input-in-output", "--draft-model=neso-pilot", "--tokenizer=some/tokenizer"]
    options += ["--parameter=enable_kv_cache_reuse=false", "--parameter=record_steps=a=b"]
    result = init("--layout=trtllm", "--model", checkpoint, *options, tmp_path / "models")
    assert result.exit_code == 0, result.output
    found = configs(tmp_path / "models")
    assert found.keys() == TRTLLM_MODELS | {"tensorrt_llm_draft"}
    assert not any(config.model_transaction_policy.decoupled for config in found.values())
    assert {config.max_batch_size for config in found.values()} == {0}
    assert not any(tensor.allow_ragged_batch for tensor in found["tensorrt_llm"].input)
    assert found["postprocessing"].instance_group[0].count == 3
    values = parameters(found["tensorrt_llm"])
    assert values["gpt_model_path"] == str(checkpoint)
    assert values["tokenizer_dir"] == "some/tokenizer"
    assert values["batch_scheduler_policy"] == "guaranteed_no_evict"
    assert values["max_beam_width"] == "4"
    assert values["max_tokens_in_paged_kv_cache"] == "4096"
    assert values["kv_cache_free_gpu_mem_fraction"] == "0.5"
    assert values["enable_chunked_context"] == "false" and values["exclude_input_in_output"] == "true"
    assert values["enable_kv_cache_reuse"] == "false" and values["record_steps"] == "a=b"
    bls = parameters(found["tensorrt_llm_bls"])
    assert bls["accumulate_tokens"] == "true" and bls["tensorrt_llm_draft_model_name"] == "tensorrt_llm_draft"
    assert parameters(found["tensorrt_llm_draft"])["gpt_model_path"] == "neso-pilot"


@pytest.mark.parametrize("layout", ["neso", "vllm"])
def test_single_model_layouts(layout, tmp_path):
    result = init("--layout", layout, "--model", "org/some-model", tmp_path)
    assert result.exit_code == 0, result.output
    found = configs(tmp_path)
    assert found["some-model"].backend == layout
    assert (tmp_path / "some-model" / "1" / "model.json").read_text() == '{\n  "model": "org/some-model"\n}\n'
    init("--layout", layout, "--model", "org/some-model", "--name=chat", tmp_path)
    assert configs(tmp_path).keys() == {"some-model", "chat"}


def test_existing_files_are_kept_without_force(tmp_path):
    init("--model", "neso-pilot", tmp_path)
    edited = tmp_path / "ensemble" / "config.pbtxt"
    written = edited.read_text()
    assert init("--model", "neso-pilot", tmp_path).exit_code == 0  # nothing would change
    edited.write_text("# edited")
    refused = init("--model", "neso-pilot", "--max-batch-size=2", tmp_path)
    assert refused.exit_code == 1 and "--force" in refused.output
    assert edited.read_text() == "# edited"
    assert configs(tmp_path)["tensorrt_llm"].max_batch_size == 64
    assert init("--model", "neso-pilot", "--force", tmp_path).exit_code == 0
    assert edited.read_text() == written


def test_invalid_arguments_are_rejected(tmp_path):
    assert init(tmp_path).exit_code == 2  # no model
    assert init("--model", "m", "--layout=other", tmp_path).exit_code == 2
    assert init("--model", "m", "--max-beam-width=0", tmp_path).exit_code == 2
    wrong = init("--model", "m", "--parameter=novalue", tmp_path)
    assert wrong.exit_code == 1 and "KEY=VALUE" in wrong.output
    (tmp_path / "file").write_text("")
    assert init("--model", "m", tmp_path / "file").exit_code == 1
    assert not any(tmp_path.glob("*/"))


def test_text_is_quoted_in_config_pbtxt():
    written = pbtxt.parameters({"path": 'a "quoted"\\path\n好'})
    assert parameters(text_format.Parse(written, pb.ModelConfig())) == {"path": 'a "quoted"\\path\n好'}


@pytest.mark.parametrize("layout", ["neso", "vllm"])
def test_model_in_the_current_directory(tmp_path, monkeypatch, layout):
    (tmp_path / "checkpoint").mkdir()
    monkeypatch.chdir(tmp_path / "checkpoint")
    assert init("--layout", layout, "--model", ".", tmp_path / "models").exit_code == 0
    assert {path.name for path in (tmp_path / "models").iterdir()} == {"checkpoint"}


@pytest.mark.parametrize("name", ["..", ".", "a/b", "/a"])
def test_invalid_folder_names_are_rejected(tmp_path, name):
    result = init("--layout", "neso", "--model", "neso-pilot", "--name", name, tmp_path / "models")
    assert result.exit_code == 1 and "cannot be the name of a model" in result.output
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("layout", "option"),
    [("vllm", "--max-batch-size=4"), ("neso", "--draft-model=neso-pilot"), ("trtllm", "--name=mine")],
)
def test_options_of_another_layout_are_rejected(tmp_path, layout, option):
    result = init("--layout", layout, "--model", "neso-pilot", option, tmp_path / "models")
    assert result.exit_code == 2 and "for the layout" in result.output
    assert not list(tmp_path.iterdir())

"""`neso build`: engine directories give the same tokens as their checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf_files import convert
from typer.testing import CliRunner

import neso._native as _native
from neso.cli.main import app
from neso.engine.client.llm import LLM
from neso.engine.config import EngineConfig
from neso.engine.errors import EngineError
from neso.engine.load.build import build_engine
from neso.engine.load.loader import load_engine
from neso.engine.parallel.layout import RankLayout
from neso.engine.runners.native.packed_decoder import _LM_HEAD_SCHEMES
from neso.engine.runners.native.packing import INT8, SCHEMES
from neso.engine.runners.runner_options import RunnerOptions, UnsupportedOption
from neso.engine.weights.checkpoint import open_source
from neso.engine.weights.engine_directory import EngineDirectory, packed_file, read_build_info, vectors_file
from neso.engine.weights.source import CheckpointError
from neso.generation import SamplingParams

Factory = Callable[..., Path]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPTS = [[7, 8, 9], list(range(20, 60)), [100]]
SHAPE = {"hidden_size": 64, "intermediate_size": 128}


def tokens(model: Path, **options: Any) -> list[list[int]]:
    llm = LLM(model, runner="native", **options)
    results = llm.generate(PROMPTS, GREEDY, progress=False)
    return [result.outputs[0].token_ids for result in results]


@pytest.mark.parametrize("quantization", [None, "int8", "int4", "int8_dynamic"])
@pytest.mark.parametrize(
    ("arch", "overrides"),
    [("llama", {"tie_word_embeddings": True}), ("qwen3", {"attention_bias": True}), ("qwen2", {})],
)
def test_same_tokens_as_the_checkpoint(
    checkpoint_factory: Factory, tmp_path: Path, quantization: Any, arch: str, overrides: dict[str, Any]
) -> None:
    checkpoint = checkpoint_factory(arch, **SHAPE, **overrides)
    seen: list[tuple[int, int]] = []
    build_engine(
        checkpoint,
        tmp_path / "engine",
        RunnerOptions(quantization=quantization),
        progress=lambda done, total: seen.append((done, total)),
    )
    assert [done for done, _ in seen] == list(range(1, seen[0][1] + 1))
    options = {} if quantization is None else {"quantization": quantization}
    assert tokens(tmp_path / "engine") == tokens(checkpoint, **options)


def test_engines_with_other_groups_keep_them(
    checkpoint_factory: Factory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Engines with `int8_dynamic` were once built with groups of 32 inputs."""
    checkpoint, engine = checkpoint_factory("llama", **SHAPE), tmp_path / "engine"
    options = {"quantization": "int8_dynamic"}
    with monkeypatch.context() as patch:
        for schemes in (SCHEMES, _LM_HEAD_SCHEMES):
            patch.setitem(schemes, "int8_dynamic", INT8)
        build_engine(checkpoint, engine, RunnerOptions(**options))
        expected = tokens(checkpoint, **options)
    source = open_source(engine)
    assert isinstance(source, EngineDirectory)
    assert {matrix["group_size"] for matrix in source.matrices.values()} == {32}
    assert tokens(engine) == expected


def test_from_a_gguf_file_with_its_tokenizer(checkpoint_factory: Factory, tmp_path: Path) -> None:
    file = convert(checkpoint_factory("llama"), tmp_path / "model.gguf")
    build_engine(file, tmp_path / "engine", RunnerOptions())
    text = "A server answers requests."
    llms = [LLM(path, runner="native") for path in (file, tmp_path / "engine")]
    answers = [llm.generate([text], GREEDY, progress=False)[0].outputs[0] for llm in llms]
    assert answers[0].token_ids == answers[1].token_ids
    assert answers[0].text == answers[1].text


def test_shards_add_up_to_the_whole(checkpoint_factory: Factory, tmp_path: Path) -> None:
    checkpoint = checkpoint_factory("llama", **SHAPE)
    for ranks in (1, 2):
        info = build_engine(checkpoint, tmp_path / str(ranks), RunnerOptions(), ranks)
        assert (info.tensor_parallel, info.pipeline_parallel) == (ranks, 1)
    whole, *shards = (
        _matrices(tmp_path / str(layout.tensor_parallel), layout)
        for layout in (RankLayout(), RankLayout(0, 2), RankLayout(1, 2))
    )
    for name in ("gate", "up"):
        both = np.concatenate([shard[f"layers.1.{name}"] for shard in shards])
        np.testing.assert_array_equal(both, whole[f"layers.1.{name}"])
    for name in ("output", "down"):
        both = np.concatenate([shard[f"layers.1.{name}"] for shard in shards], axis=1)
        np.testing.assert_array_equal(both, whole[f"layers.1.{name}"])
    # Queries, keys and values of each rank are stacked.
    parts = [np.split(shard["layers.1.qkv"], [32, 48]) for shard in shards]
    both = np.concatenate([np.concatenate(pair) for pair in zip(*parts, strict=True)])
    np.testing.assert_array_equal(both, whole["layers.1.qkv"])
    with pytest.raises(
        UnsupportedOption, match="tensor_parallel_size 5 is larger than the number of attention"
    ):
        build_engine(checkpoint, tmp_path / "5", RunnerOptions(), 5)
    with pytest.raises(UnsupportedOption, match="rank 2 is not one of 2 ranks"):
        build_engine(checkpoint, tmp_path / "2", RunnerOptions(), 2, rank=2)


@pytest.mark.parametrize("arch", ["phi3", "mixtral", "gpt2"])
def test_stages_have_the_layers_of_the_whole(checkpoint_factory: Factory, tmp_path: Path, arch: str) -> None:
    checkpoint = checkpoint_factory(arch)
    seen: list[tuple[int, int]] = []
    build_engine(checkpoint, tmp_path / "1", RunnerOptions())
    build_engine(
        checkpoint,
        tmp_path / "3",
        RunnerOptions(),
        pipeline_parallel=3,
        progress=lambda *done: seen.append(done),
    )
    assert [done for done, _ in seen] == list(range(1, seen[0][1] + 1))
    whole = _matrices(tmp_path / "1", RankLayout())
    for rank in range(3):
        found = _matrices(tmp_path / "3", RankLayout(rank, 1, 3))
        own = {name.replace("layers.0.", f"layers.{2 - rank}."): matrix for name, matrix in found.items()}
        expected = {name for name in whole if name.startswith(f"layers.{2 - rank}.")}
        assert set(own) == expected | ({"lm_head"} if rank == 0 else set())
        for name, matrix in own.items():
            np.testing.assert_array_equal(matrix, whole[name])


def test_engines_of_other_numbers_of_ranks_are_rejected(checkpoint_factory: Factory, tmp_path: Path) -> None:
    engine = tmp_path / "engine"
    build_engine(checkpoint_factory("llama", **SHAPE), engine, RunnerOptions(), 2)
    with pytest.raises(EngineError, match=r"built for tensor_parallel_size 2 .* but the options are 1 and 1"):
        load_engine(EngineConfig(model=str(engine)))
    with pytest.raises(CheckpointError, match="neso build --tp 1 --pp 2"):
        open_source(engine, RankLayout(0, 1, 2))
    (engine / vectors_file(1)).replace(engine / vectors_file(0))
    with pytest.raises(CheckpointError, match="belongs to rank 1 of tensor_parallel_size 2"):
        open_source(engine, RankLayout(0, 2))
    with pytest.raises(CheckpointError, match=r"rank1\.vectors"):
        open_source(engine, RankLayout(1, 2))


def test_ranks_can_be_built_one_by_one(checkpoint_factory: Factory, tmp_path: Path) -> None:
    """In one directory, or on several hosts."""
    checkpoint = checkpoint_factory("llama", **SHAPE)
    build_engine(checkpoint, tmp_path / "all", RunnerOptions(), 2, 2)
    for rank in range(4):
        build_engine(checkpoint, tmp_path / "one", RunnerOptions(), 2, 2, rank)
    written = [
        {path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in ("all", "one")
    ]
    assert written[0] == written[1]
    with pytest.raises(FileExistsError, match="already has the files of rank 3"):
        build_engine(checkpoint, tmp_path / "one", RunnerOptions(), 2, 2, 3)
    build_engine(checkpoint, tmp_path / "host", RunnerOptions(), 2, 2, 0)
    with pytest.raises(FileExistsError, match="an engine with other options"):
        build_engine(checkpoint, tmp_path / "host", RunnerOptions(quantization="int8"), 2, 2, 1)
    with open_source(tmp_path / "host", RankLayout(0, 2, 2)) as source:
        assert "lm_head.data" in source


def _matrices(directory: Path, layout: RankLayout) -> dict[str, np.ndarray]:
    """The dense matrices of a rank."""
    engine = open_source(directory, layout)
    assert isinstance(engine, EngineDirectory)
    arrays = engine.arrays()
    result = {}
    for name, of in engine.matrices.items():
        matrix = _native.Matrix("f32", of["outputs"], of["inputs"], arrays[f"{name}.data"])
        rows = np.empty((of["outputs"], of["inputs"]), np.float32)
        for index, row in enumerate(rows):
            _native.matrix_row(matrix, index, row, "generic")
        result[name] = rows
    return result


def test_mismatches_are_rejected(checkpoint_factory: Factory, tmp_path: Path) -> None:
    checkpoint = checkpoint_factory("llama", **SHAPE)
    engine = tmp_path / "engine"
    build_engine(checkpoint, engine, RunnerOptions(quantization="int8"))
    for options, message in [
        ({"quantization": "int4"}, "built with quantization int8, not int4"),
        ({"dtype": "bfloat16"}, "built with dtype float32, not bfloat16"),
        ({"runner": "reference"}, "packed for the native runner"),
    ]:
        with pytest.raises(EngineError, match=message):
            load_engine(EngineConfig.from_options(str(engine), options))
    with pytest.raises(FileExistsError, match="not empty"):
        build_engine(checkpoint, engine, RunnerOptions())
    with pytest.raises(UnsupportedOption, match="engine directory already"):
        build_engine(engine, tmp_path / "again", RunnerOptions())
    config = engine / "config.json"
    written = config.read_text()
    config.write_text(written.replace('"format": 2', '"format": 99'))
    with pytest.raises(EngineError, match="format 99, this version reads 2"):
        load_engine(EngineConfig(model=str(engine)))
    config.write_text(written)
    packed = engine / packed_file(0)
    packed.write_bytes(packed.read_bytes()[:-64])
    with pytest.raises(EngineError, match="truncated"):
        load_engine(EngineConfig(model=str(engine)))


def test_a_failed_build_leaves_no_engine(checkpoint_factory: Factory, tmp_path: Path) -> None:
    checkpoint = checkpoint_factory("llama", **SHAPE)

    def fail(done: int, total: int) -> None:
        if done == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build_engine(checkpoint, tmp_path / "engine", RunnerOptions(), progress=fail)
    assert not list((tmp_path / "engine").iterdir())


def test_command_line(checkpoint_factory: Factory, tmp_path: Path) -> None:
    checkpoint, engine = str(checkpoint_factory("llama", **SHAPE)), str(tmp_path / "engine")
    built = CliRunner().invoke(app, ["build", checkpoint, engine, "--quantization", "int4"])
    assert built.exit_code == 0, built.output
    assert "MB in" in built.output
    again = CliRunner().invoke(app, ["build", checkpoint, engine])
    assert again.exit_code == 1
    ranks = str(tmp_path / "ranks")
    for rank in ("0", "1"):
        built = CliRunner().invoke(app, ["build", checkpoint, ranks, "--tp", "2", "--rank", rank])
        assert built.exit_code == 0, built.output
    assert read_build_info(tmp_path / "ranks").tensor_parallel == 2
    refused = CliRunner().invoke(app, ["build", checkpoint, ranks, "--tensor-parallel", "2", "--pp", "9"])
    assert refused.exit_code == 1
    assert "pipeline_parallel_size 9 is larger than the number of layers" in refused.output
    missing = CliRunner().invoke(app, ["build", str(tmp_path / "nowhere"), engine])
    assert missing.exit_code == 1

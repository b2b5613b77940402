"""`neso build --quantization fp8`."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from runners.plan_builder import PlanBuilder, random_tokens, run_in_chunks

from neso.engine.client.llm import LLM
from neso.engine.load.build import build_float8, round_to_float8
from neso.engine.runners.registry import runner_class
from neso.engine.runners.runner_options import RunnerOptions
from neso.engine.specs.registry import decoder_spec
from neso.engine.weights.checkpoint import Checkpoint
from neso.engine.weights.quantized import Float8Matrix
from neso.generation import SamplingParams


def test_rounding_error_is_at_most_half_a_step() -> None:
    weights = np.random.default_rng(0).standard_normal((5, 70)).astype(np.float32)
    weights[2] = 0
    rounded = round_to_float8(weights).dequantize()
    # Three bits of mantissa; subnormal values below 2 ** -6 * largest / 448 have uniform steps.
    step = np.maximum(np.abs(weights) * 2.0**-3, np.abs(weights).max(axis=1, keepdims=True) / 448 * 2.0**-9)
    assert (np.abs(rounded - weights) <= step / 2 + 1e-9).all()


def logits(runner: str, directory: Path) -> np.ndarray:
    with Checkpoint(directory) as checkpoint:
        spec = decoder_spec(checkpoint.config)
        loaded = runner_class(runner).load(spec, checkpoint, RunnerOptions(dtype="float32"))
    builder = PlanBuilder()
    loaded.allocate_cache(builder.layout)
    return run_in_chunks(loaded, builder, random_tokens(20), [20])


@pytest.mark.parametrize(
    "overrides", [{}, {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}]
)
def test_all_runners_load_it(
    checkpoint_factory: Callable[..., Path], tmp_path: Path, overrides: dict[str, bool]
) -> None:
    source = checkpoint_factory("llama", **overrides)
    target = tmp_path / "fp8"
    build_float8(source, target)
    found = [logits(runner, target) for runner in ("reference", "native", "torch")]
    np.testing.assert_allclose(found[1], found[0], atol=2e-4)
    np.testing.assert_allclose(found[2], found[0], atol=2e-4)
    dense = logits("reference", source)
    assert 0 < np.linalg.norm(found[0] - dense) / np.linalg.norm(dense) < 0.3
    with Checkpoint(target) as checkpoint:
        matrix = checkpoint.matrix("model.layers.1.mlp.down_proj.weight", (48, 80))
        assert isinstance(matrix, Float8Matrix)
        assert checkpoint.tensor("model.embed_tokens.weight").dtype == ml_dtypes.bfloat16


def test_the_tokenizer_is_copied(llama_checkpoint: Path, tmp_path: Path) -> None:
    target = tmp_path / "fp8"
    build_float8(llama_checkpoint, target)
    (result,) = LLM(target, runner="reference").generate(
        ["The quick"], SamplingParams(temperature=0, max_tokens=4), progress=False
    )
    assert len(result.outputs[0].token_ids) == 4


def test_progress_reaches_the_number_of_tensors(llama_checkpoint: Path, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    build_float8(llama_checkpoint, tmp_path / "fp8", lambda done, total: seen.append((done, total)))
    assert seen == [(done, len(seen)) for done in range(1, len(seen) + 1)]


def test_a_non_empty_directory_is_rejected(llama_checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    with pytest.raises(FileExistsError, match="not empty"):
        build_float8(llama_checkpoint, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_command_line(llama_checkpoint: Path, tmp_path: Path) -> None:
    neso = Path(sys.executable).with_name("neso")
    target = tmp_path / "fp8"
    command = [neso, "build", llama_checkpoint, target, "--quantization", "fp8"]
    refused = subprocess.run([*command, "--dtype", "float32"], capture_output=True, text=True)
    assert refused.returncode == 1
    assert "fp8 cannot be combined" in refused.stderr
    subprocess.run(command, check=True, capture_output=True)
    config = json.loads((target / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "fbgemm_fp8"

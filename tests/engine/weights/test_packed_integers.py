"""GPTQ and AWQ checkpoints, packed by the test according to the format definitions."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from parallel.thread_ranks import ThreadRanks
from runners.plan_builder import mixed_batch
from weights.packed_checkpoints import FORMATS, SHAPE, make_both

from neso.engine.client.llm import LLM
from neso.engine.runners.reference.runner import ReferenceRunner
from neso.engine.runners.runner_options import RunnerOptions
from neso.engine.specs.registry import decoder_spec
from neso.engine.weights.checkpoint import Checkpoint
from neso.engine.weights.quantized import QuantizedMatrix
from neso.engine.weights.source import CheckpointError
from neso.generation import SamplingParams

Factory = Callable[..., Path]


@pytest.fixture(params=FORMATS)
def both(request: pytest.FixtureRequest, checkpoint_factory: Factory, tmp_path: Path) -> tuple[Path, Path]:
    """A quantized checkpoint, and a dense one with the same weights."""
    return make_both(checkpoint_factory("llama", **SHAPE), tmp_path, FORMATS[request.param])


def test_packed_weights_round_trip(both: tuple[Path, Path]) -> None:
    name, shape = "model.layers.1.mlp.down_proj.weight", (64, 128)
    with Checkpoint(both[0]) as quantized, Checkpoint(both[1]) as dense:
        matrix = quantized.matrix(name, shape)
        assert isinstance(matrix, QuantizedMatrix)
        np.testing.assert_allclose(matrix.dequantize(), dense.tensor(name), rtol=1e-5, atol=1e-6)
        found = np.empty(shape, np.float32)
        quantized.read_float32(name, found)
        np.testing.assert_array_equal(found, matrix.dequantize())
        assert name in quantized
        with pytest.raises(CheckpointError, match=r"down_proj\.qweight.*needs"):
            quantized.matrix(name, (64, 256))


# The native runner rounds activations to 16 bits and offsets to 11, so later tokens may differ with random weights.
@pytest.mark.parametrize(("runner", "length"), [("reference", 10), ("native", 2)])
def test_tokens_equal_the_dense_checkpoint(both: tuple[Path, Path], runner: str, length: int) -> None:
    greedy = SamplingParams(temperature=0, max_tokens=length, ignore_eos=True)
    prompts = [[7, 8, 9], list(range(20, 60))]
    answers = [
        [
            result.outputs[0].token_ids
            for result in LLM(path, runner=runner, dtype="float32").generate(prompts, greedy, progress=False)
        ]
        for path in both
    ]
    assert answers[0] == answers[1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"quant_method": "bitsandbytes"}, "quant_method 'bitsandbytes' is not supported"),
        ({"bits": 3}, r"quantization_config\.bits 3 is not supported"),
        ({"group_size": 48}, r"group_size must be -1 or a multiple of 32, not 48"),
        ({"quant_method": "awq", "version": "gemv"}, r"quantization_config\.version 'gemv'"),
    ],
)
def test_unsupported_formats_are_named_in_errors(
    llama_checkpoint: Path, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    directory = Path(shutil.copytree(llama_checkpoint, tmp_path / "model"))
    written = json.loads((directory / "config.json").read_text())
    config = {**FORMATS["gptq"], **change}
    (directory / "config.json").write_text(json.dumps({**written, "quantization_config": config}))
    with pytest.raises(CheckpointError, match=message):
        Checkpoint(directory)


@pytest.mark.parametrize("both", ["gptq", "awq"], indirect=True)
def test_quantization_config_in_a_file_of_its_own(both: tuple[Path, Path]) -> None:
    """AutoGPTQ and AutoAWQ used to write it beside config.json, without `quant_method`."""
    directory, name = both[0], "model.layers.1.mlp.down_proj.weight"
    with Checkpoint(directory) as source:
        expected = source.matrix(name, (64, 128)).dequantize()
    config = json.loads((directory / "config.json").read_text())
    separate = config.pop("quantization_config")
    (directory / "config.json").write_text(json.dumps(config))
    file = "quantize_config.json"
    if separate.pop("quant_method") == "awq":
        file = "quant_config.json"
        separate = {"w_bit": separate["bits"], "q_group_size": separate["group_size"], "version": "GEMM"}
    (directory / file).write_text(json.dumps(separate))
    with Checkpoint(directory) as source:
        np.testing.assert_array_equal(source.matrix(name, (64, 128)).dequantize(), expected)


def test_shards_of_ranks(both: tuple[Path, Path]) -> None:
    """Groups of 32, one group for all inputs, and permuted inputs are cut between two and three ranks."""
    with Checkpoint(both[0]) as checkpoint:
        spec = decoder_spec(checkpoint.config)
        expected = mixed_batch(ReferenceRunner.load(spec, checkpoint))
        for layout in ((2, 1), (3, 2)):
            ranks = ThreadRanks.open(ReferenceRunner, spec, checkpoint, *layout, RunnerOptions())
            np.testing.assert_allclose(mixed_batch(ranks), expected, atol=5e-4)

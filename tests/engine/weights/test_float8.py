"""Float8 checkpoints, quantized by the test with torch according to the format definitions."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from checkpoints import rewrite_config
from safetensors.torch import load_file, save_file

from neso.engine.client.llm import LLM
from neso.engine.config import EngineConfig
from neso.engine.errors import EngineError
from neso.engine.load.build import build_engine
from neso.engine.load.loader import load_engine
from neso.engine.runners.runner_options import RunnerOptions
from neso.engine.weights.checkpoint import Checkpoint
from neso.engine.weights.quantized import Float8Matrix
from neso.engine.weights.source import CheckpointError
from neso.generation import SamplingParams

Factory = Callable[..., Path]
GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
PROMPTS = [[7, 8, 9], list(range(20, 60))]
LARGEST = torch.finfo(torch.float8_e4m3fn).max
QUERY = "model.layers.0.self_attn.q_proj.weight"
DOWN = "model.layers.1.mlp.down_proj.weight"
DOWN_SHAPE = (48, 80)  # 1.5 times 2.5 blocks of 32
# As in the list of excluded modules of a config.
LEFT_OUT = ("lm_head.weight", "model.layers.0.mlp.down_proj.weight")


@dataclass(frozen=True)
class Float8Case:
    """Quantization of a checkpoint; `block` as in `Float8Matrix`, None for a whole dimension."""

    config: dict[str, Any]
    scale: str
    block: tuple[int | None, int | None]
    dtype: torch.dtype = torch.float32
    scalar: bool = False


def compressed(strategy: str, **fields: Any) -> dict[str, Any]:
    weights = {"type": "float", "num_bits": 8, "strategy": strategy, "symmetric": True}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}},
        "ignore": ["lm_head"],
        **fields,
    }


BLOCKS = {"quant_method": "fp8", "weight_block_size": [32, 32], "activation_scheme": "dynamic"}
FORMS = {
    "fp8-blocks": Float8Case(BLOCKS, "weight_scale_inv", (32, 32)),
    "fp8-blocks-bfloat16": Float8Case(
        {**BLOCKS, "weight_block_size": [32, 64]}, "weight_scale_inv", (32, 64), torch.bfloat16
    ),
    "fp8-large-blocks": Float8Case(
        {**BLOCKS, "weight_block_size": [128, 128]}, "weight_scale_inv", (128, 128)
    ),
    "fp8-tensor": Float8Case(
        {"quant_method": "fp8", "weight_block_size": None, "activation_scheme": "static"},
        "weight_scale_inv",
        (None, None),
        torch.bfloat16,
        scalar=True,
    ),
    "fp8-weight-scale": Float8Case({"quant_method": "fp8"}, "weight_scale", (None, None)),
    "compressed-tensor": Float8Case(compressed("tensor"), "weight_scale", (None, None)),
    "compressed-channel": Float8Case(compressed("channel"), "weight_scale", (1, None), torch.bfloat16),
    "compressed-naive": Float8Case(
        compressed("channel", format="naive-quantized"), "weight_scale", (1, None)
    ),
    "fbgemm": Float8Case(
        {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}, "weight_scale", (1, None)
    ),
}


def quantize(weight: torch.Tensor, form: Float8Case) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes, scales and dequantized weights, block by block."""
    outputs, inputs = weight.shape
    height, width = form.block[0] or outputs, form.block[1] or inputs
    codes = torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
    exact = torch.empty_like(weight)
    scales = torch.empty(-(-outputs // height), -(-inputs // width), dtype=form.dtype)
    for row in range(scales.shape[0]):
        for column in range(scales.shape[1]):
            at = np.s_[row * height : (row + 1) * height, column * width : (column + 1) * width]
            scales[row, column] = weight[at].abs().max() / LARGEST
            scale = scales[row, column].float()
            codes[at] = (weight[at] / scale).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
            exact[at] = codes[at].float() * scale
    if form.block == (None, None):
        scales = scales.reshape(() if form.scalar else (1,))
    return codes, scales, exact


def make_both(source: Path, directory: Path, form: Float8Case) -> tuple[Path, Path]:
    """A quantized checkpoint, and a dense float32 one with the same weights."""
    quantized, dense = (Path(shutil.copytree(source, directory / name)) for name in ("quantized", "dense"))
    stored, plain = load_file(source / "model.safetensors"), load_file(source / "model.safetensors")
    for name, weight in plain.items():
        if "_proj.weight" in name and name not in LEFT_OUT:
            codes, scales, plain[name] = quantize(weight, form)
            layer = name.removesuffix(".weight")
            stored |= {name: codes, f"{layer}.{form.scale}": scales, f"{layer}.input_scale": torch.ones(1)}
    save_file(stored, quantized / "model.safetensors")
    save_file(plain, dense / "model.safetensors")
    rewrite_config(quantized, quantization_config=form.config)
    return quantized, dense


@pytest.fixture(params=FORMS)
def both(request: pytest.FixtureRequest, llama_checkpoint: Path, tmp_path: Path) -> tuple[Path, Path]:
    return make_both(llama_checkpoint, tmp_path, FORMS[request.param])


@pytest.fixture
def blocks(llama_checkpoint: Path, tmp_path: Path) -> tuple[Path, Path]:
    return make_both(llama_checkpoint, tmp_path, FORMS["fp8-blocks"])


def edit_tensors(directory: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors")


def tokens(model: Path, runner: str, **options: Any) -> list[list[int]]:
    results = LLM(model, runner=runner, **options).generate(PROMPTS, GREEDY, progress=False)
    return [result.outputs[0].token_ids for result in results]


@pytest.mark.parametrize("block", [(1, 7), (1, 5), (3, 2), (3, 5), (2, 5), (4, 9)])
def test_matrix_has_one_scale_per_block(block: tuple[int, int]) -> None:
    # All codes including NaN, in a matrix whose sides are not multiples of the block.
    codes = np.resize(np.arange(256, dtype=np.uint8), (59, 5)).view(ml_dtypes.float8_e4m3fn)
    scales = np.random.default_rng(0).uniform(0.5, 2, (-(-59 // block[0]), -(-5 // block[1])))
    matrix = Float8Matrix(codes, scales.astype(np.float32), block)
    wide = matrix.scales.repeat(block[0], axis=0).repeat(block[1], axis=1)[:59, :5]
    values = torch.from_numpy(codes.view(np.uint8).copy()).view(torch.float8_e4m3fn).float().numpy()
    found = matrix.dequantize()
    assert matrix.shape == found.shape == (59, 5) and found.dtype == np.float32
    assert np.isnan(found).any()
    np.testing.assert_array_equal(found, values * wide)


def test_inconsistent_matrix_is_rejected() -> None:
    codes = np.zeros((4, 6), ml_dtypes.float8_e4m3fn)
    one = np.ones((1, 1), np.float32)
    with pytest.raises(ValueError, match=r"must have the shape \(2, 2\)"):
        Float8Matrix(codes, one, (3, 4))
    with pytest.raises(ValueError, match="not supported"):
        Float8Matrix(codes, one, (0, 6))
    with pytest.raises(ValueError, match="not float8_e5m2"):
        Float8Matrix(codes.astype(ml_dtypes.float8_e5m2), one, (4, 6))


def test_weights_round_trip(both: tuple[Path, Path]) -> None:
    with Checkpoint(both[0]) as quantized, Checkpoint(both[1]) as dense:
        for name in dense.names():
            shape = dense.tensor(name).shape
            found = np.empty(shape, np.float32)
            quantized.read_float32(name, found)
            np.testing.assert_array_equal(found, dense.tensor(name), err_msg=name)
            assert name in quantized
        matrix = quantized.matrix(DOWN, DOWN_SHAPE)
        assert isinstance(matrix, Float8Matrix)
        np.testing.assert_array_equal(matrix.dequantize(), dense.tensor(DOWN))
        for name in LEFT_OUT:
            assert isinstance(quantized.matrix(name, dense.tensor(name).shape), np.ndarray)
        with pytest.raises(CheckpointError, match=r"down_proj\.weight.*\[48, 80\].*needs \[48, 81\]"):
            quantized.matrix(DOWN, (48, 81))
        with pytest.raises(CheckpointError, match=r"down_proj\.weight' is quantized"):
            quantized.tensor(DOWN)


def test_tokens_equal_the_dense_checkpoint(both: tuple[Path, Path]) -> None:
    quantized, dense = both
    expected = tokens(dense, "reference")
    assert tokens(quantized, "reference") == expected
    assert tokens(quantized, "native", dtype="float32") == expected


def test_float8_is_packed_as_bfloat16(blocks: tuple[Path, Path]) -> None:
    quantized, dense = blocks
    assert tokens(quantized, "native") == tokens(dense, "native", dtype="bfloat16")


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_float8_can_be_requantized(blocks: tuple[Path, Path], quantization: str) -> None:
    of_quantized, of_dense = (
        tokens(path, "native", dtype="float32", quantization=quantization) for path in blocks
    )
    assert of_quantized == of_dense


@pytest.mark.parametrize("quantization", [None, "int8"])
def test_engine_directory_gives_the_same_tokens(
    both: tuple[Path, Path], tmp_path: Path, quantization: Any
) -> None:
    info = build_engine(both[0], tmp_path / "engine", RunnerOptions(quantization=quantization))
    assert info.dtype == "bfloat16"
    options = {} if quantization is None else {"quantization": quantization}
    assert tokens(tmp_path / "engine", "native") == tokens(both[0], "native", **options)


def test_shards_equal_those_of_the_dense_checkpoint(blocks: tuple[Path, Path], tmp_path: Path) -> None:
    # 40 inputs per rank: the boundary is in the middle of a block.
    options = RunnerOptions(dtype="float32")
    for path in blocks:
        build_engine(path, tmp_path / f"{path.name}-engine", options, tensor_parallel=2)
    files = [sorted((tmp_path / f"{path.name}-engine").glob("rank*.safetensors"), key=str) for path in blocks]
    assert len(files[0]) == 4
    for ours, theirs in zip(*files, strict=True):
        assert ours.read_bytes() == theirs.read_bytes()


@pytest.mark.parametrize(
    ("form", "change", "message"),
    [
        (
            "fp8-blocks",
            {"model.layers.1.mlp.down_proj.weight_scale_inv": torch.ones(3, 2)},
            r"down_proj\.weight_scale_inv' has the shape \[3, 2\], but fp8 weights of \[48, 80\] need \[2, 3\]",
        ),
        (
            "fp8-tensor",
            {"model.layers.1.mlp.down_proj.weight_scale_inv": torch.ones(48, 1)},
            r"down_proj\.weight_scale_inv' has the shape \[48, 1\].*need \[1\]$",
        ),
        (
            "compressed-channel",
            {"model.layers.1.mlp.down_proj.weight_scale": torch.ones(1, 80)},
            r"down_proj\.weight_scale' has the shape \[1, 80\].*need \[1\] or \[48, 1\]",
        ),
        (
            "fbgemm",
            {"model.layers.1.mlp.down_proj.weight_scale": torch.ones(1)},
            r"down_proj\.weight_scale' has the shape \[1\].*need \[48, 1\]",
        ),
        (
            "fp8-blocks",
            {"model.layers.1.mlp.down_proj.weight_scale_inv": torch.ones(2, 3, dtype=torch.int32)},
            r"down_proj\.weight_scale_inv' has the type int32; scales must be",
        ),
        (
            "fp8-blocks",
            {"model.layers.1.mlp.down_proj.weight_scale_inv": None},
            r"down_proj\.weight' is float8_e4m3fn, .*no 'model.*weight_scale_inv' and no '.*\.weight_scale'$",
        ),
        (
            "fbgemm",
            {"model.layers.1.mlp.down_proj.weight_scale": None},
            r"has no scales for it: no 'model\.layers\.1\.mlp\.down_proj\.weight_scale'$",
        ),
        (
            "fp8-blocks",
            {DOWN: torch.ones(DOWN_SHAPE).to(torch.float8_e5m2)},
            r"down_proj\.weight' has the type float8_e5m2; only float8_e4m3fn is supported",
        ),
        *(
            (
                "fp8-blocks",
                {DOWN: torch.full(DOWN_SHAPE, code, dtype=torch.uint8).view(torch.float8_e4m3fn)},
                r"down_proj\.weight' contains weights that are NaN$",
            )
            for code in (127, 255)
        ),
    ],
)
def test_invalid_tensors_are_named_in_errors(
    llama_checkpoint: Path,
    tmp_path: Path,
    form: str,
    change: dict[str, torch.Tensor | None],
    message: str,
) -> None:
    directory, _ = make_both(llama_checkpoint, tmp_path, FORMS[form])

    def apply(tensors: dict[str, torch.Tensor]) -> None:
        for name, tensor in change.items():
            del tensors[name]
            if tensor is not None:
                tensors[name] = tensor

    edit_tensors(directory, apply)
    with Checkpoint(directory) as checkpoint:
        with pytest.raises(CheckpointError, match=message):
            checkpoint.matrix(DOWN, DOWN_SHAPE)
        with pytest.raises(CheckpointError, match=message):
            checkpoint.read_float32(DOWN, np.empty(DOWN_SHAPE, np.float32))
    for runner in ("reference", "native"):
        with pytest.raises(EngineError, match=message):
            load_engine(EngineConfig.from_options(str(directory), {"runner": runner}))


def with_weights(**fields: Any) -> dict[str, Any]:
    config = compressed("channel")
    config["config_groups"]["group_0"]["weights"] |= fields
    return config


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (compressed("channel", format="pack-quantized"), r"quantization_config\.format 'pack-quantized'"),
        (compressed("channel", format="int-quantized"), r"quantization_config\.format 'int-quantized'"),
        ({"quant_method": "compressed-tensors"}, r"quantization_config\.format None"),
        (with_weights(type="int"), r"config_groups\.group_0\.weights\.type 'int'"),
        (with_weights(num_bits=4), r"config_groups\.group_0\.weights\.num_bits 4"),
        (with_weights(symmetric=False), r"config_groups\.group_0\.weights\.symmetric False"),
        (with_weights(strategy="group"), r"config_groups\.group_0\.weights\.strategy 'group'"),
        (compressed("channel", config_groups=["FP8"]), r"config_groups must hold JSON objects"),
        (compressed("channel", config_groups={"g": ["Linear"]}), r"config_groups must hold JSON objects"),
        (compressed("channel", config_groups={"g": {"weights": 8}}), r"g\.weights must be a JSON object"),
        (compressed("channel", transform_config={"config_groups": {"R1": {}}}), r"\.transform_config is not"),
        ({"quant_method": "fp8", "weight_block_size": 128}, r"weight_block_size must be two integers.*128"),
        ({"quant_method": "fp8", "weight_block_size": [128, 0]}, r"weight_block_size must be two integers"),
        ({"quant_method": "nvfp4"}, r"'nvfp4' is not supported; supported are gptq, awq, fp8, compressed"),
    ],
)
def test_unsupported_configs_are_named_in_errors(
    llama_checkpoint: Path, tmp_path: Path, config: dict[str, Any], message: str
) -> None:
    directory = Path(shutil.copytree(llama_checkpoint, tmp_path / "model"))
    rewrite_config(directory, quantization_config=config)
    with pytest.raises(CheckpointError, match=message):
        Checkpoint(directory)


def test_float8_without_quantization_config_is_rejected(blocks: tuple[Path, Path]) -> None:
    rewrite_config(blocks[0], remove=("quantization_config",))
    assert "quantization_config" not in json.loads((blocks[0] / "config.json").read_text())
    with (
        Checkpoint(blocks[0]) as checkpoint,
        pytest.raises(CheckpointError, match=r"q_proj\.weight' has the type float8_e4m3fn"),
    ):
        checkpoint.matrix(QUERY, (48, 48))

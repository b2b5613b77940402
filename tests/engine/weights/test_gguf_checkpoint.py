"""GGUF files give the same model as the checkpoint that they were converted from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from gguf import GGUFWriter
from gguf_files import convert, encode

from neso.engine.core.step_plan import StepPlan
from neso.engine.runners.base import CacheLayout
from neso.engine.runners.reference.runner import ReferenceRunner
from neso.engine.specs.decoder_spec import DecoderSpec
from neso.engine.specs.registry import decoder_spec
from neso.engine.weights.checkpoint import Checkpoint, open_source
from neso.engine.weights.gguf.checkpoint import GGUFCheckpoint
from neso.engine.weights.quantized import QuantizedMatrix
from neso.engine.weights.source import CheckpointError, TensorSource

Factory = Callable[..., Path]

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama tied": ("llama", {"tie_word_embeddings": True}),
    "llama biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama wide heads": ("llama", {"head_dim": 20, "num_key_value_heads": 1}),
    "mistral": ("mistral", {}),
    "mistral window": ("mistral", {"sliding_window": 9}),
    "qwen2": ("qwen2", {}),
    "qwen2 tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {}),
    "qwen3 biases": ("qwen3", {"attention_bias": True}),
    "mixtral": ("mixtral", {}),
    "qwen2_moe": ("qwen2_moe", {}),
    "qwen3_moe": ("qwen3_moe", {"norm_topk_prob": True}),
}
# Rows are whole blocks for every type.
WIDE = {"hidden_size": 256, "head_dim": 64, "intermediate_size": 512, "num_hidden_layers": 1}
Q_PROJ = "model.layers.0.self_attn.q_proj.weight"


def rope(kind: str, **fields: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **fields}}


def logits(source: TensorSource) -> np.ndarray:
    """Logits of 30 tokens with the reference runner."""
    runner = ReferenceRunner.load(decoder_spec(source.config), source)
    runner.allocate_cache(CacheLayout(num_blocks=4, block_size=16))
    return runner.step(
        StepPlan(
            step=1,
            sequence_ids=np.array([1], np.int32),
            token_ids=np.random.default_rng(0).integers(6, 300, 30).astype(np.int32),
            query_start=np.array([0, 30], np.int32),
            num_computed=np.array([0], np.int32),
            block_tables=np.array([[2, 1]], np.int32),
            block_copies=np.empty((0, 2), np.int32),
            logits_rows=np.arange(30, dtype=np.int32),
        )
    )


def float32_of(source: TensorSource, name: str, shape: tuple[int, ...]) -> np.ndarray:
    target = np.full(shape, np.nan, np.float32)
    source.read_float32(name, target)
    return target


def comparable(spec: DecoderSpec) -> DecoderSpec:
    """Metadata values are float32, and GGUF names Mistral "llama"."""
    family = {"mistral": "llama"}.get(spec.family, spec.family)
    return replace(spec, family=family, norm_eps=float(np.float32(spec.norm_eps)))


@pytest.mark.parametrize("model", MODELS)
def test_float32_file_equals_the_checkpoint(checkpoint_factory: Factory, tmp_path: Path, model: str) -> None:
    arch, overrides = MODELS[model]
    checkpoint = checkpoint_factory(arch, **overrides)
    path = convert(checkpoint, tmp_path / "model.gguf")
    with Checkpoint(checkpoint) as theirs, open_source(path) as ours:
        assert isinstance(ours, GGUFCheckpoint)
        assert comparable(decoder_spec(ours.config)) == comparable(decoder_spec(theirs.config))
        assert sorted(ours.names()) == sorted(theirs.names())
        for name in theirs.names():
            np.testing.assert_array_equal(ours.tensor(name), theirs.tensor(name), err_msg=name)
        np.testing.assert_array_equal(logits(ours), logits(theirs))


@pytest.mark.parametrize(
    ("parameters", "edit"),
    [
        (
            rope("linear", factor=2.0),
            lambda w, arch: (
                w.add_rope_scaling_type(gguf.RopeScalingType.LINEAR),
                w.add_rope_scaling_factor(2.0),
            ),
        ),
        (rope("linear", factor=2.0), lambda w, arch: w.add_float32(f"{arch}.rope.scale_linear", 2.0)),
        (rope("default"), lambda w, arch: w.add_rope_scaling_type(gguf.RopeScalingType.NONE)),
        (
            rope("yarn", factor=4.0, original_max_position_embeddings=128, beta_fast=16.0),
            lambda w, arch: (
                w.add_rope_scaling_type(gguf.RopeScalingType.YARN),
                w.add_rope_scaling_factor(4.0),
                w.add_rope_scaling_orig_ctx_len(128),
                w.add_rope_scaling_yarn_beta_fast(16.0),
            ),
        ),
    ],
)
def test_rope_scaling(
    checkpoint_factory: Factory, tmp_path: Path, parameters: dict[str, Any], edit: Callable[..., None]
) -> None:
    checkpoint = checkpoint_factory("llama", **parameters)
    with (
        Checkpoint(checkpoint) as theirs,
        open_source(convert(checkpoint, tmp_path / "m.gguf", edit=edit)) as ours,
    ):
        assert decoder_spec(ours.config).rotaries == decoder_spec(theirs.config).rotaries


def converter_factors(head_dim: int, theta: float, factor: float, length: int) -> np.ndarray:
    """Return the factors that converters write for Llama 3, by wavelength as in Meta's code."""
    factors = []
    for frequency in 1.0 / theta ** (np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)):
        wavelength = 2 * np.pi / frequency
        if wavelength < length / 4.0:
            factors.append(1.0)
        elif wavelength > length / 1.0:
            factors.append(factor)
        else:
            smooth = (length / wavelength - 1.0) / (4.0 - 1.0)
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(factors, np.float32)


@pytest.mark.parametrize(("factor", "length"), [(8.0, 8192), (32.0, 8192), (4.0, 2048)])
def test_llama3_scaling_is_recovered_from_factors(
    checkpoint_factory: Factory, tmp_path: Path, factor: float, length: int
) -> None:
    scaling = rope(
        "llama3",
        factor=factor,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=length,
    )
    checkpoint = checkpoint_factory("llama", head_dim=64, **scaling)
    factors = converter_factors(64, 10000.0, factor, length)
    assert ((factors > 1) & (factors < factor)).any(), "some must be on the ramp"
    path = convert(
        checkpoint, tmp_path / "m.gguf", edit=lambda w, _: w.add_tensor("rope_freqs.weight", factors)
    )
    with Checkpoint(checkpoint) as theirs, open_source(path) as ours:
        assert decoder_spec(ours.config).rotaries == decoder_spec(theirs.config).rotaries
        assert "rope_freqs.weight" not in ours


@pytest.mark.parametrize(
    ("factors", "defect"),
    [
        (np.linspace(1, 9, 6), "no known scaling"),
        (np.full(6, np.nan), "no known"),
        (np.ones(5) * 2, r"F32 \[5\]"),
    ],
)
def test_unknown_rope_factors(
    llama_checkpoint: Path, tmp_path: Path, factors: np.ndarray, defect: str
) -> None:
    path = convert(
        llama_checkpoint,
        tmp_path / "m.gguf",
        edit=lambda w, _: w.add_tensor("rope_freqs.weight", factors.astype(np.float32)),
    )
    with pytest.raises(CheckpointError, match=defect):
        GGUFCheckpoint(path)


def test_rope_factors_of_one_mean_no_scaling(llama_checkpoint: Path, tmp_path: Path) -> None:
    ones = np.ones(6, np.float32)
    path = convert(
        llama_checkpoint, tmp_path / "m.gguf", edit=lambda w, _: w.add_tensor("rope_freqs.weight", ones)
    )
    with GGUFCheckpoint(path) as source:
        assert decoder_spec(source.config).rotaries[0].scaling is None


@pytest.mark.parametrize("kind", [Type.F16, Type.BF16])
def test_half_precision_is_not_converted(llama_checkpoint: Path, tmp_path: Path, kind: Type) -> None:
    with (
        Checkpoint(llama_checkpoint) as theirs,
        open_source(convert(llama_checkpoint, tmp_path / "m.gguf", lambda name: kind)) as ours,
    ):
        stored, full = ours.matrix(Q_PROJ, (48, 48)), theirs.tensor(Q_PROJ)
        assert (
            isinstance(stored, np.ndarray)
            and stored.dtype.name == {"F16": "float16", "BF16": "bfloat16"}[kind.name]
        )
        np.testing.assert_array_equal(stored, full.astype(stored.dtype))
        np.testing.assert_array_equal(
            float32_of(ours, Q_PROJ, (48, 48)), full.astype(stored.dtype).astype(np.float32)
        )


@pytest.mark.parametrize("arch", ["llama", "qwen3"])
@pytest.mark.parametrize(
    "kind", [Type.Q8_0, Type.Q4_0, Type.Q5_1, Type.Q2_K, Type.Q4_K, Type.Q6_K, Type.IQ4_XS]
)
def test_quantized_logits_equal_dequantized_weights(
    checkpoint_factory: Factory, tmp_path: Path, kind: Type, arch: str
) -> None:
    checkpoint = checkpoint_factory(arch, **WIDE)
    path = convert(checkpoint, tmp_path / "m.gguf", lambda name: kind)
    with Checkpoint(checkpoint) as theirs, open_source(path) as ours:
        expected = Dequantized(theirs, kind)
        for name in theirs.names():
            shape = theirs.tensor(name).shape
            np.testing.assert_array_equal(float32_of(ours, name, shape), expected.tensor(name), err_msg=name)
            np.testing.assert_array_equal(ours.tensor(name, shape), expected.tensor(name), err_msg=name)
        np.testing.assert_array_equal(logits(ours), logits(expected))


class Dequantized:
    """A checkpoint with matrices quantized and dequantized by the `gguf` package."""

    def __init__(self, source: Checkpoint, kind: Type) -> None:
        self.directory, self.config = source.directory, source.config
        self._source, self._kind = source, kind

    def __contains__(self, name: str) -> bool:
        return name in self._source

    def tensor(self, name: str) -> np.ndarray:
        values = self._source.tensor(name)
        if values.ndim == 1:
            return values
        return gguf.quants.dequantize(encode(values, self._kind, seed=len(name)), self._kind)

    def read_float32(self, name: str, target: np.ndarray) -> None:
        target[...] = self.tensor(name)


@pytest.mark.parametrize(
    ("kind", "bits", "offsets"),
    [
        *((Type.Q8_0, 8, False), (Type.Q4_0, 4, False), (Type.Q4_1, 4, True), (Type.Q5_0, 8, False)),
        *((Type.Q2_K, 8, True), (Type.Q3_K, 8, False), (Type.Q4_K, 4, True), (Type.Q5_K, 8, True)),
        *((Type.Q6_K, 8, False), (Type.IQ4_NL, 8, False)),
    ],
)
def test_quantized_matrices(
    checkpoint_factory: Factory, tmp_path: Path, kind: Type, bits: int, offsets: bool
) -> None:
    path = convert(checkpoint_factory("llama", **WIDE), tmp_path / "m.gguf", lambda name: kind)
    with open_source(path) as source:
        found = source.matrix(Q_PROJ, (256, 256))
        exact = float32_of(source, Q_PROJ, (256, 256))
    assert isinstance(found, QuantizedMatrix)
    assert (found.bits, found.group_size, found.offsets is not None) == (bits, 32, offsets)
    assert found.codes.max() < 2**bits
    if kind not in (Type.Q2_K, Type.Q3_K, Type.Q6_K):
        np.testing.assert_array_equal(found.dequantize(), exact)


def test_shapes_and_missing_tensors(llama_checkpoint: Path, tmp_path: Path) -> None:
    with GGUFCheckpoint(convert(llama_checkpoint, tmp_path / "m.gguf")) as source:
        assert Q_PROJ in source and "model.norm.bias" not in source
        with pytest.raises(CheckpointError, match=r"m\.gguf.*model\.norm\.bias"):
            source.tensor("model.norm.bias")
        with pytest.raises(CheckpointError, match=r"attn_q.*\[48, 48\].*\[48, 49\]"):
            source.matrix(Q_PROJ, (48, 49))
        with pytest.raises(CheckpointError, match=r"output_norm.*\[48\].*\[47\]"):
            source.read_float32("model.norm.weight", np.empty(47, np.float32))


def test_tensors_outlive_the_file(llama_checkpoint: Path, tmp_path: Path) -> None:
    with GGUFCheckpoint(convert(llama_checkpoint, tmp_path / "m.gguf")) as source:
        before = source.tensor("model.norm.weight")
    assert np.isfinite(before).all() and not before.flags.writeable
    with pytest.raises(CheckpointError, match="closed"):
        source.tensor("model.norm.weight")


@pytest.mark.parametrize(
    ("edit", "defect"),
    [
        (lambda w, arch: w.add_uint32(f"{arch}.expert_count", 8), "expert_used_count"),
        (lambda w, arch: w.add_string(f"{arch}.rope.scaling.type", "longrope"), "longrope"),
        (lambda w, arch: w.add_string(f"{arch}.rope.scaling.type", "yarn"), r"rope\.scaling\.factor"),
        (lambda w, arch: w.add_uint32(f"{arch}.rope.dimension_count", 6), "dimension_count"),
        (lambda w, arch: w.add_array(f"{arch}.attention.head_count_kv", [2, 1, 2]), "differs between layers"),
        (lambda w, arch: w.add_uint32(f"{arch}.block_count", 0), "block_count.*positive"),
        (lambda w, arch: w.add_string(f"{arch}.context_length", "long"), "context_length.*integer"),
        (lambda w, arch: w.add_float32(f"{arch}.rope.freq_base", float("nan")), "freq_base.*number"),
        (lambda w, arch: w.add_string("general.architecture", "mamba"), "architecture 'mamba'"),
        (lambda w, arch: w.add_string("general.type", "adapter"), "adapter"),
        (lambda w, arch: w.add_uint16("split.count", 3), "one of 3 parts"),
        (
            lambda w, arch: w.add_tensor("blk.0.ffn_gate_inp.weight", np.ones((2, 2), np.float32)),
            "ffn_gate_inp",
        ),
        (lambda w, arch: w.add_tensor("blk.0.attn_q_norm.weight", np.ones(12, np.float32)), "attn_q_norm"),
        (lambda w, arch: w.add_token_list([f"t{i}" for i in range(400)]), "400 tokens.*384 rows"),
    ],
)
def test_unsupported_models(
    llama_checkpoint: Path, tmp_path: Path, edit: Callable[[GGUFWriter, str], None], defect: str
) -> None:
    path = convert(llama_checkpoint, tmp_path / "odd.gguf", edit=edit)
    with pytest.raises(CheckpointError, match=rf"odd\.gguf.*{defect}"):
        GGUFCheckpoint(path)


def test_mismatched_number_of_heads(llama_checkpoint: Path, tmp_path: Path) -> None:
    path = convert(
        llama_checkpoint,
        tmp_path / "m.gguf",
        edit=lambda w, arch: w.add_uint32(f"{arch}.attention.head_count", 8),
    )
    with (
        GGUFCheckpoint(path) as source,
        pytest.raises(CheckpointError, match=r"attn_q.*48 rows, not 8 heads of 12"),
    ):
        source.tensor(Q_PROJ)

"""All weights of a decoder, packed for the kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from neso.engine.runners.base import RunnerOptions
from neso.engine.runners.native.pack import KINDS, Packer
from neso.engine.runners.native.packed_matrix import Kind, PackedMatrix
from neso.engine.specs.decoder_spec import DecoderSpec
from neso.engine.specs.tensor_roles import Role, Shape, layer_shapes, model_shapes
from neso.engine.weights.source import Matrix, WeightSource

Float32Array = npt.NDArray[np.float32]

_DTYPES: dict[str, np.dtype[Any]] = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}


@dataclass(frozen=True, slots=True)
class PackedLayer:
    """qkv: queries, keys and values, one below the other. Norms are float32."""

    attention_norm: Float32Array
    qkv: PackedMatrix
    query_norm: Float32Array | None
    key_norm: Float32Array | None
    output: PackedMatrix
    mlp_norm: Float32Array
    gate: PackedMatrix
    up: PackedMatrix
    down: PackedMatrix


@dataclass(frozen=True, slots=True)
class PackedDecoder:
    """`embedding` [vocab_size, hidden] has rows as they are; None where lm_head serves as the embedding."""

    layers: list[PackedLayer]
    final_norm: Float32Array
    lm_head: PackedMatrix
    embedding: npt.NDArray[Any] | None

    @property
    def cache_kind(self) -> Kind:
        """How keys and values are kept: exact for float32 weights, else bfloat16."""
        return "f32" if all(layer.qkv.kind == "f32" for layer in self.layers) else "bf16"


def pack_decoder(
    spec: DecoderSpec, source: WeightSource, options: RunnerOptions, threads: int
) -> PackedDecoder:
    """Read and pack everything. Raises `CheckpointError` when a tensor is missing or does not fit."""
    return _Loader(spec, source, options, threads).load()


class _Loader:
    def __init__(self, spec: DecoderSpec, source: WeightSource, options: RunnerOptions, threads: int) -> None:
        self._spec = spec
        self._source = source
        self._shapes: dict[Role, Shape] = {**model_shapes(spec), **layer_shapes(spec)}
        self._dtype = _dense_dtype(spec, source, options)
        scheme = {None: None, "int8": "int8", "int4": "int4", "int8_dynamic": "int8"}[options.quantization]
        dynamic = options.quantization == "int8_dynamic"
        self._packer = Packer(KINDS[self._dtype], scheme, dynamic, threads)

    def load(self) -> PackedDecoder:
        spec = self._spec
        return PackedDecoder(
            layers=[self._layer(layer) for layer in range(spec.num_layers)],
            final_norm=self._vector("final_norm"),
            lm_head=self._packer.pack([self._matrix("embedding" if spec.tied_embeddings else "lm_head")]),
            embedding=None if spec.tied_embeddings else self._embedding(),
        )

    def _layer(self, layer: int) -> PackedLayer:
        spec = self._spec
        qkv: tuple[Role, ...] = ("query_bias", "key_bias", "value_bias")
        return PackedLayer(
            attention_norm=self._vector("attention_norm", layer),
            qkv=self._packer.pack(
                [self._matrix(role, layer) for role in ("query", "key", "value")],
                self._bias(qkv, layer, spec.qkv_bias),
            ),
            query_norm=self._vector("query_norm", layer) if spec.qk_norm else None,
            key_norm=self._vector("key_norm", layer) if spec.qk_norm else None,
            output=self._packer.pack(
                [self._matrix("output", layer)], self._bias(("output_bias",), layer, spec.output_bias)
            ),
            mlp_norm=self._vector("mlp_norm", layer),
            gate=self._packer.pack(
                [self._matrix("gate", layer)], self._bias(("gate_bias",), layer, spec.mlp_bias)
            ),
            up=self._packer.pack(
                [self._matrix("up", layer)], self._bias(("up_bias",), layer, spec.mlp_bias)
            ),
            down=self._packer.pack(
                [self._matrix("down", layer)], self._bias(("down_bias",), layer, spec.mlp_bias)
            ),
        )

    def _matrix(self, role: Role, layer: int | None = None) -> Matrix:
        outputs, inputs = self._shapes[role]
        return self._source.matrix(self._spec.tensor_name(role, layer), (outputs, inputs))

    def _vector(self, role: Role, layer: int | None = None) -> Float32Array:
        target = np.empty(self._shapes[role], np.float32)
        self._source.read_float32(self._spec.tensor_name(role, layer), target)
        return target

    def _bias(self, roles: tuple[Role, ...], layer: int, present: bool) -> Float32Array | None:
        return np.concatenate([self._vector(role, layer) for role in roles]) if present else None

    def _embedding(self) -> npt.NDArray[Any]:
        """A copy in the dtype of the dense weights."""
        stored = self._source.tensor(self._spec.tensor_name("embedding"), self._shapes["embedding"])
        dtype = self._dtype if self._dtype != np.float16 or stored.dtype == np.float16 else np.float32
        return np.array(stored, dtype, order="C")


def _dense_dtype(spec: DecoderSpec, source: WeightSource, options: RunnerOptions) -> np.dtype[Any]:
    """Of the weights that are not quantized: what was asked for, else what the norms say of the checkpoint."""
    if options.dtype != "auto":
        return _DTYPES[options.dtype]
    matrix = source.matrix(spec.tensor_name("query", 0), layer_shapes(spec)["query"])  # type: ignore[arg-type]
    stored = matrix.dtype if isinstance(matrix, np.ndarray) else None
    return stored if stored in KINDS else _DTYPES["float32" if stored == np.float64 else "bfloat16"]

"""All weights of a decoder, packed for the kernels."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import ml_dtypes
import numpy as np
import numpy.typing as npt

from neso.engine.runners.base import RunnerOptions
from neso.engine.runners.native.arena import Arena
from neso.engine.runners.native.pack import INT4, INT8, KINDS, Packer, Scheme
from neso.engine.runners.native.packed_matrix import Kind, PackedMatrix
from neso.engine.specs.decoder_spec import DecoderSpec
from neso.engine.specs.tensor_roles import Role, Shape, layer_shapes, model_shapes
from neso.engine.weights.source import Matrix, WeightSource

Float32Array = npt.NDArray[np.float32]
Item = PackedMatrix | npt.NDArray[Any]

T = TypeVar("T", PackedMatrix, npt.NDArray[Any])

_DTYPES: dict[str, np.dtype[Any]] = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}
_SCHEMES: dict[str | None, Scheme | None] = {None: None, "int8": INT8, "int4": INT4, "int8_dynamic": INT8}
# Its errors go straight into the logits, and as the embedding into everything.
_LM_HEAD_SCHEMES: dict[str | None, Scheme | None] = {**_SCHEMES, "int4": INT8}


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

    @classmethod
    def assemble(cls, spec: DecoderSpec, items: Mapping[str, Item]) -> PackedDecoder:
        """From items named as `pack_items` names them. Raises `KeyError` when one is missing."""

        def layer(index: int) -> PackedLayer:
            names = [field.name for field in fields(PackedLayer)]
            values = {name: items.get(f"layers.{index}.{name}") for name in names}
            optional = () if spec.qk_norm else ("query_norm", "key_norm")
            for name, value in values.items():
                if value is None and name not in optional:
                    raise KeyError(f"layers.{index}.{name}")
            return PackedLayer(**values)  # type: ignore[arg-type]

        return cls(
            layers=[layer(index) for index in range(spec.num_layers)],
            final_norm=_expect(items["final_norm"], np.ndarray),
            lm_head=_expect(items["lm_head"], PackedMatrix),
            embedding=None if spec.tied_embeddings else _expect(items["embedding"], np.ndarray),
        )

    def moved(self, arena: Arena) -> PackedDecoder:
        """The same with its packed matrices copied into `arena`."""

        def move(matrix: PackedMatrix) -> PackedMatrix:
            return replace(matrix, data=arena.copy(matrix.data))

        layers = [
            replace(
                layer,
                qkv=move(layer.qkv),
                output=move(layer.output),
                gate=move(layer.gate),
                up=move(layer.up),
                down=move(layer.down),
            )
            for layer in self.layers
        ]
        return replace(self, layers=layers, lm_head=move(self.lm_head))

    @property
    def cache_kind(self) -> Kind:
        """How keys and values are kept: exact for float32 weights, else bfloat16."""
        return "f32" if all(layer.qkv.kind == "f32" for layer in self.layers) else "bf16"


def _expect(item: Item, kind: type[T]) -> T:
    assert isinstance(item, kind)
    return item


def pack_items(
    spec: DecoderSpec, source: WeightSource, options: RunnerOptions, threads: int
) -> Iterator[tuple[str, Item]]:
    """Read and pack matrix by matrix: names like "layers.0.qkv", and what `PackedDecoder` has under them.

    Raises `CheckpointError` when a tensor is missing or does not fit.
    """
    dtype = dense_dtype(spec, source, options)
    packer = Packer(
        KINDS[dtype], _SCHEMES[options.quantization], options.quantization == "int8_dynamic", threads
    )
    reader = _Reader(spec, source)
    for layer in range(spec.num_layers):
        for name, item in _layer_items(reader, packer, layer):
            yield f"layers.{layer}.{name}", item
    yield "final_norm", reader.vector("final_norm")
    head_packer = replace(packer, scheme=_LM_HEAD_SCHEMES[options.quantization])
    yield "lm_head", head_packer.pack([reader.matrix("embedding" if spec.tied_embeddings else "lm_head")])
    if not spec.tied_embeddings:
        yield "embedding", reader.embedding(dtype)


def dense_dtype(spec: DecoderSpec, source: WeightSource, options: RunnerOptions) -> np.dtype[Any]:
    """Of the weights that are not quantized: what was asked for, else what the checkpoint has."""
    if options.dtype != "auto":
        return _DTYPES[options.dtype]
    outputs, inputs = layer_shapes(spec)["query"]
    matrix = source.matrix(spec.tensor_name("query", 0), (outputs, inputs))
    if not isinstance(matrix, np.ndarray):
        return _DTYPES["bfloat16"]
    return matrix.dtype if matrix.dtype in KINDS else _DTYPES["float32"]


def _layer_items(reader: _Reader, packer: Packer, layer: int) -> Iterator[tuple[str, Item]]:
    spec = reader.spec

    def packed(roles: tuple[Role, ...], biases: tuple[Role, ...], biased: bool) -> PackedMatrix:
        bias = np.concatenate([reader.vector(role, layer) for role in biases]) if biased else None
        return packer.pack([reader.matrix(role, layer) for role in roles], bias)

    yield "attention_norm", reader.vector("attention_norm", layer)
    qkv_biases: tuple[Role, ...] = ("query_bias", "key_bias", "value_bias")
    yield "qkv", packed(("query", "key", "value"), qkv_biases, spec.qkv_bias)
    if spec.qk_norm:
        yield "query_norm", reader.vector("query_norm", layer)
        yield "key_norm", reader.vector("key_norm", layer)
    yield "output", packed(("output",), ("output_bias",), spec.output_bias)
    yield "mlp_norm", reader.vector("mlp_norm", layer)
    yield "gate", packed(("gate",), ("gate_bias",), spec.mlp_bias)
    yield "up", packed(("up",), ("up_bias",), spec.mlp_bias)
    yield "down", packed(("down",), ("down_bias",), spec.mlp_bias)


class _Reader:
    """Weights by role, with the shapes that the spec gives them."""

    def __init__(self, spec: DecoderSpec, source: WeightSource) -> None:
        self.spec = spec
        self._source = source
        self._shapes: dict[Role, Shape] = {**model_shapes(spec), **layer_shapes(spec)}

    def matrix(self, role: Role, layer: int | None = None) -> Matrix:
        outputs, inputs = self._shapes[role]
        return self._source.matrix(self.spec.tensor_name(role, layer), (outputs, inputs))

    def vector(self, role: Role, layer: int | None = None) -> Float32Array:
        target = np.empty(self._shapes[role], np.float32)
        self._source.read_float32(self.spec.tensor_name(role, layer), target)
        return target

    def embedding(self, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
        """A copy in the dtype of the dense weights; only float16 weights are kept as float16."""
        stored = self._source.tensor(self.spec.tensor_name("embedding"), self._shapes["embedding"])
        if dtype == np.float16 and stored.dtype != np.float16:
            dtype = np.dtype(np.float32)
        return np.array(stored, dtype, order="C")

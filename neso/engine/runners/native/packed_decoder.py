"""All weights of a decoder packed for the kernels, and their storage in engine directories."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from neso.engine.parallel.layout import RankLayout
from neso.engine.runners.native.packing import (
    DTYPES,
    INT8,
    KINDS,
    SCHEMES,
    Arena,
    Kind,
    PackedMatrix,
    Packer,
    Scheme,
)
from neso.engine.runners.runner_options import RunnerOptions, UnsupportedOption
from neso.engine.specs.decoder_spec import EXPERT_ROLES, NORM_BIASES, DecoderSpec, Role
from neso.engine.thread_placement import ThreadPlacement
from neso.engine.weights.engine_directory import EngineDirectory, RankInfo, packed_file, vectors_file
from neso.engine.weights.model_tensors import DecoderTensors
from neso.engine.weights.quantized import Matrix, QuantizedMatrix, dense
from neso.engine.weights.safetensors_file import SafetensorsWriter
from neso.engine.weights.source import CheckpointError

Float32Array = npt.NDArray[np.float32]
Item = PackedMatrix | npt.NDArray[Any]

T = TypeVar("T", PackedMatrix, npt.NDArray[Any])

# Rounding errors of lm_head directly affect the logits, and all layers if it is also the embedding.
_LM_HEAD_SCHEMES: dict[str | None, Scheme | None] = {**SCHEMES, "int4": INT8}
_BIASES: dict[Role, Role] = {
    "query": "query_bias",
    "key": "key_bias",
    "value": "value_bias",
    "output": "output_bias",
    "gate": "gate_bias",
    "up": "up_bias",
    "down": "down_bias",
}


@dataclass(frozen=True, slots=True)
class PackedMLP:
    """gate: None in a plain MLP."""

    gate: PackedMatrix | None
    up: PackedMatrix
    down: PackedMatrix


@dataclass(frozen=True, slots=True)
class PackedExperts:
    """router: one output per expert, then one for the shared expert's gate, if present."""

    router: PackedMatrix
    experts: list[PackedMLP]
    shared: PackedMLP | None


@dataclass(frozen=True, slots=True)
class PackedLayer:
    """vectors: norms and their biases by role, float32; qkv: queries, keys and values, stacked."""

    vectors: dict[str, Float32Array]
    qkv: PackedMatrix
    output: PackedMatrix
    mlp: PackedMLP | PackedExperts


@dataclass(frozen=True, slots=True)
class PackedDecoder:
    """All weights of a decoder.

    - vectors: the final norm and its bias, float32
    - lm_head: None if the spec has no head
    - embedding: [vocab_size, hidden], not packed; None if tied to lm_head, or if the spec has no embedding
    - positions: learned positions float32[positions, hidden], or None
    """

    layers: list[PackedLayer]
    vectors: dict[str, Float32Array]
    lm_head: PackedMatrix | None
    embedding: npt.NDArray[Any] | None
    positions: Float32Array | None

    @classmethod
    def assemble(cls, spec: DecoderSpec, items: Mapping[str, Item]) -> PackedDecoder:
        """Create a decoder from the items of `pack_items`. Raises `KeyError` if one is missing."""

        def matrix(name: str) -> PackedMatrix:
            return _expect(items[name], PackedMatrix)

        def mlp(prefix: str) -> PackedMLP:
            gate = matrix(prefix + "gate") if spec.gated else None
            return PackedMLP(gate, matrix(prefix + "up"), matrix(prefix + "down"))

        def experts(prefix: str) -> PackedExperts:
            assert spec.experts is not None
            return PackedExperts(
                matrix(prefix + "router"),
                [mlp(f"{prefix}experts.{index}.") for index in range(spec.experts.count)],
                None if spec.experts.shared_size is None else mlp(prefix + "shared."),
            )

        def layer(index: int) -> PackedLayer:
            prefix = f"layers.{index}."
            return PackedLayer(
                {role: _expect(items[prefix + role], np.ndarray) for role in _layer_vectors(spec)},
                matrix(prefix + "qkv"),
                matrix(prefix + "output"),
                experts(prefix) if spec.is_sparse(index) else mlp(prefix),
            )

        return cls(
            layers=[layer(index) for index in range(spec.num_layers)],
            vectors={role: _expect(items[role], np.ndarray) for role in _final_vectors(spec)},
            lm_head=matrix("lm_head") if spec.has_head else None,
            embedding=_expect(items["embedding"], np.ndarray) if _stores_embedding(spec) else None,
            positions=_expect(items["positions"], np.ndarray) if _stores_positions(spec) else None,
        )

    def moved(self, arena: Arena) -> PackedDecoder:
        """Return a copy with its packed matrices in `arena`."""

        def move(matrix: PackedMatrix) -> PackedMatrix:
            return replace(matrix, data=arena.copy(matrix.data, matrix.panels))

        def move_mlp(mlp: PackedMLP) -> PackedMLP:
            return PackedMLP(mlp.gate and move(mlp.gate), move(mlp.up), move(mlp.down))

        def move_any(mlp: PackedMLP | PackedExperts) -> PackedMLP | PackedExperts:
            if isinstance(mlp, PackedMLP):
                return move_mlp(mlp)
            experts = [move_mlp(expert) for expert in mlp.experts]
            return PackedExperts(move(mlp.router), experts, mlp.shared and move_mlp(mlp.shared))

        layers = [
            replace(layer, qkv=move(layer.qkv), output=move(layer.output), mlp=move_any(layer.mlp))
            for layer in self.layers
        ]
        return replace(self, layers=layers, lm_head=self.lm_head and move(self.lm_head))

    @property
    def cache_kind(self) -> Kind:
        """Dtype of the KV cache: float32 for float32 weights, otherwise bfloat16."""
        return "f32" if all(layer.qkv.kind == "f32" for layer in self.layers) else "bf16"


def _layer_vectors(spec: DecoderSpec) -> list[Role]:
    """Return the roles of the norms and their biases, in packing order."""
    roles: list[Role] = []
    for role in spec.layer_norms:
        roles += [role, NORM_BIASES[role]] if spec.norm_bias else [role]
    return [*roles, "query_norm", "key_norm"] if spec.qk_norm else roles


def _final_vectors(spec: DecoderSpec) -> list[Role]:
    if not spec.has_head or not spec.has_final_norm:
        return []
    return ["final_norm", "final_norm_bias"] if spec.norm_bias else ["final_norm"]


def _stores_embedding(spec: DecoderSpec) -> bool:
    return spec.has_embedding and not spec.tied_embeddings


def _stores_positions(spec: DecoderSpec) -> bool:
    return spec.has_embedding and spec.position_offset is not None


def _expect(item: Item, kind: type[T]) -> T:
    assert isinstance(item, kind)
    return item


def pack_items(
    tensors: DecoderTensors, options: RunnerOptions, threads: ThreadPlacement
) -> Iterator[tuple[str, Item]]:
    """Read and pack one matrix at a time: yields (name, item) with names like "layers.0.qkv", see `assemble`.

    Raises `CheckpointError` if a tensor is missing or has the wrong shape.
    """
    spec, dtype = tensors.spec, dense_dtype(tensors, options)
    packer = Packer.from_options(options, dtype, threads)
    for layer in range(spec.num_layers):
        for name, item in _LayerPacker(tensors, packer, layer).items():
            yield f"layers.{layer}.{name}", item
    for role in _final_vectors(spec):
        yield role, tensors.vector(role)
    if spec.has_head:
        head_packer = replace(packer, scheme=_LM_HEAD_SCHEMES[options.quantization])
        bias = tensors.vector("lm_head_bias") if spec.lm_head_bias else None
        head = tensors.matrix("embedding" if spec.tied_embeddings else "lm_head")
        yield "lm_head", head_packer.pack([head], bias)
    if _stores_embedding(spec):
        yield "embedding", _embedding(tensors, dtype)
    if _stores_positions(spec):
        yield "positions", np.array(tensors.table("position_embedding"), np.float32, order="C")


def count_items(spec: DecoderSpec) -> int:
    """Return the number of items that `pack_items` yields."""
    total = spec.has_head + len(_final_vectors(spec)) + _stores_embedding(spec) + _stores_positions(spec)
    of_mlp = 2 + spec.gated
    for layer in range(spec.num_layers):
        total += len(_layer_vectors(spec)) + 2
        if spec.experts is not None and spec.is_sparse(layer):
            total += 1 + of_mlp * (spec.experts.count + (spec.experts.shared_size is not None))
        else:
            total += of_mlp
    return total


def dense_dtype(tensors: DecoderTensors, options: RunnerOptions) -> np.dtype[Any]:
    """Return the dtype of weights that are not quantized: the option's, otherwise the checkpoint's."""
    if options.dtype != "auto":
        return DTYPES[options.dtype]
    matrix = tensors.matrix("query", 0)
    if not isinstance(matrix, np.ndarray):
        return DTYPES["bfloat16"]
    return matrix.dtype if matrix.dtype in KINDS else DTYPES["float32"]


class _LayerPacker:
    """Packs one layer."""

    def __init__(self, tensors: DecoderTensors, packer: Packer, layer: int) -> None:
        self._tensors = tensors
        self._packer = packer
        self._layer = layer

    def items(self) -> Iterator[tuple[str, Item]]:
        spec = self._tensors.spec
        for role in _layer_vectors(spec):
            yield role, self._tensors.vector(role, self._layer)
        yield (
            "qkv",
            self._pack(("query", "key", "value"), self._biases(spec.qkv_bias, "query", "key", "value")),
        )
        yield "output", self._pack(("output",), self._biases(spec.output_bias, "output"))
        if spec.is_sparse(self._layer):
            yield from self._experts()
            return
        for role in _mlp_roles(spec):
            yield role, self._pack((role,), self._biases(spec.mlp_bias, role))

    def _experts(self) -> Iterator[tuple[str, Item]]:
        spec = self._tensors.spec
        experts = spec.experts
        assert experts is not None
        # Not quantized, because rounding errors of the router would send tokens to other experts.
        exact = replace(self._packer, scheme=None)
        roles: tuple[Role, ...] = ("router", "shared_router") if experts.shared_gated else ("router",)
        yield "router", exact.pack([self._tensors.matrix(role, self._layer) for role in roles])
        for index in range(experts.count):
            parts = self._uniform([self._tensors.matrix(role, self._layer, index) for role in EXPERT_ROLES])
            for name, part in zip(("gate", "up", "down"), parts, strict=True):
                yield f"experts.{index}.{name}", self._packer.pack([part])
        if experts.shared_size is not None:
            shared: tuple[Role, ...] = ("shared_gate", "shared_up", "shared_down")
            for name, role in zip(("gate", "up", "down"), shared, strict=True):
                yield f"shared.{name}", self._pack((role,), None)

    def _uniform(self, parts: list[Matrix]) -> list[Matrix]:
        """Dequantize unless gate and up have the same kind and no inputs are permuted, as required by the kernels."""
        quantized = [part for part in parts if isinstance(part, QuantizedMatrix)]
        kinds = {
            (part.bits, part.group_size) if isinstance(part, QuantizedMatrix) else None for part in parts[:2]
        }
        if len(kinds) == 1 and all(part.input_order is None for part in quantized):
            return parts
        return [dense(part) for part in parts]

    def _pack(self, roles: tuple[Role, ...], bias: Float32Array | None) -> PackedMatrix:
        return self._packer.pack([self._tensors.matrix(role, self._layer) for role in roles], bias)

    def _biases(self, biased: bool, *roles: Role) -> Float32Array | None:
        """Return the concatenated biases of these matrices."""
        if not biased:
            return None
        return np.concatenate([self._tensors.vector(_BIASES[role], self._layer) for role in roles])


def _mlp_roles(spec: DecoderSpec) -> tuple[Role, ...]:
    return ("gate", "up", "down") if spec.gated else ("up", "down")


def _embedding(tensors: DecoderTensors, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """Return a copy in the dtype of the dense weights; only float16 weights are stored as float16."""
    stored = tensors.table("embedding")
    if dtype == np.float16 and stored.dtype != np.float16:
        dtype = np.dtype(np.float32)
    return np.array(stored, dtype, order="C")


# Size of a header entry: name, dtype, shape, two offsets. An item has at most five arrays, and an entry of about the
# same size in the metadata.
_ENTRY_BYTES = 160
_ENTRIES_PER_ITEM = 7


def write_rank(
    directory: Path, layout: RankLayout, spec: DecoderSpec, items: Iterable[tuple[str, Item]]
) -> None:
    """Write the files of one rank item by item. `spec`: the decoder of the rank."""
    header_bytes = _ENTRY_BYTES * (1 + _ENTRIES_PER_ITEM * count_items(spec))
    matrices: dict[str, dict[str, Any]] = {}
    with (
        SafetensorsWriter(directory / packed_file(layout.rank), header_bytes) as packed,
        SafetensorsWriter(directory / vectors_file(layout.rank), header_bytes) as vectors,
    ):
        for name, item in items:
            if not isinstance(item, PackedMatrix):
                vectors.add(name, item)
                continue
            matrices[name] = item.numbers()
            for field, array in item.arrays().items():
                (packed if field == "data" else vectors).add(f"{name}.{field}", array)
        info = RankInfo(
            rank=layout.rank,
            tensor_parallel=layout.tensor_parallel,
            pipeline_parallel=layout.pipeline_parallel,
            matrices=matrices,
        )
        vectors.metadata[RankInfo.METADATA_KEY] = msgspec.json.encode(info).decode()


def read_engine(spec: DecoderSpec, directory: EngineDirectory, options: RunnerOptions) -> PackedDecoder:
    """Memory-map the weights of an engine directory.

    Raises `UnsupportedOption` if the options differ from those of the build, `CheckpointError` if an item is missing.
    """
    _check_options(directory, options)
    arrays = directory.arrays()
    items: dict[str, Item] = {
        name: array for name, array in arrays.items() if name.rpartition(".")[0] not in directory.matrices
    }
    for name, numbers in directory.matrices.items():
        fields = {
            field: arrays[f"{name}.{field}"]
            for field in ("data", "scales", "offsets", "input_order", "bias")
            if f"{name}.{field}" in arrays
        }
        items[name] = PackedMatrix(**numbers, **{field: _aligned(a) for field, a in fields.items()})  # type: ignore[arg-type]
    try:
        return PackedDecoder.assemble(spec, items)
    except KeyError as error:
        raise CheckpointError(f"{directory.directory}: the engine lacks {error}; build it again") from None


def _aligned(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return a copy if the array is unaligned, which small vectors of a file may be."""
    return array if array.flags.aligned else np.array(array)


def _check_options(directory: EngineDirectory, options: RunnerOptions) -> None:
    build = directory.build
    if options.dtype not in ("auto", build.dtype):
        raise UnsupportedOption(
            f"{directory.directory} was built with dtype {build.dtype}, not {options.dtype}"
        )
    if options.quantization not in (None, build.quantization):
        raise UnsupportedOption(
            f"{directory.directory} was built with quantization {build.quantization or 'none'}, "
            f"not {options.quantization}"
        )

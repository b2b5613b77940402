"""Types of the extension module; csrc/bindings/ has the implementation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

_U8 = npt.NDArray[np.uint8]
_U16 = npt.NDArray[np.uint16]
_I32 = npt.NDArray[np.int32]
_F32 = npt.NDArray[np.float32]
_F64 = npt.NDArray[np.float64]

def supported_isas() -> list[str]: ...
def default_isa() -> str: ...
def zero_pages(bytes: int) -> _U8: ...
def packed_bytes(kind: str, outputs: int, inputs: int) -> int: ...
def pack_dense(
    source_kind: str, source: _U8, inputs: int, kind: str, first_output: int, to: _U8, threads: int
) -> None: ...
def pack_codes(codes: _U8, kind: str, first_output: int, to: _U8, threads: int) -> None: ...
def quantize(
    source_kind: str, source: _U8, bits: int, group_size: int, codes: _U8, scales: _F32, threads: int
) -> None: ...

class Matrix:
    def __init__(
        self,
        kind: str,
        outputs: int,
        inputs: int,
        data: _U8,
        scales: _U16 | None = None,
        offsets: _U16 | None = None,
        group_size: int = 0,
        scale_factor: float = 1.0,
        dynamic: bool = False,
        input_order: _I32 | None = None,
        bias: _F32 | None = None,
    ) -> None: ...

class Mlp:
    def __init__(self, gate: Matrix | None, up: Matrix, down: Matrix) -> None: ...

class Experts:
    def __init__(self, router: Matrix, experts: list[Mlp], shared: Mlp | None) -> None: ...

class Layer:
    def __init__(
        self,
        vectors: dict[str, _F32],
        qkv: Matrix,
        output: Matrix,
        mlp: Mlp | None,
        experts: Experts | None,
        window: int,
        rotary: int,
    ) -> None: ...

class Weights:
    def __init__(
        self,
        layers: list[Layer],
        vectors: dict[str, _F32],
        lm_head: Matrix | None,
        embedding: _U8 | None,
        embedding_kind: str,
        positions: _F32 | None,
    ) -> None: ...

class AllReduce:
    def sum(self, values: _F32) -> None: ...

class SharedAllReduce(AllReduce):
    def __init__(self, segments: list[_U8], rank: int, piece: int) -> None: ...
    @staticmethod
    def segment_bytes(piece: int) -> int: ...

class MpiAllReduce(AllReduce):
    def __init__(self, function: int, in_place: int, type: int, operation: int, group: int) -> None: ...

class Adapter:
    def __init__(self, kind: str, layers: int) -> None: ...
    def add_product(self, layer: int, product: int, inputs: int, a: _U8, scales: _F32) -> None: ...
    def add_part(
        self, layer: int, product: int, first_output: int, outputs: int, rank: int, b: _U8
    ) -> None: ...

class Decoder:
    def __init__(self, **parameters: Any) -> None: ...
    def set_weights(self, weights: Weights) -> None: ...
    def set_adapter(self, slot: int, adapter: Adapter | None) -> None: ...
    def set_all_reduce(self, all_reduce: AllReduce) -> None: ...
    def record_loops(self, work: Callable[[], None]) -> list[tuple[float, bool, float]]: ...
    def set_sink_tokens(self, count: int) -> None: ...
    def allocate_cache(
        self, num_blocks: int, block_size: int, memory: npt.NDArray[np.uint8] | None = None
    ) -> None: ...
    def cache_bytes_per_block(self, block_size: int) -> int: ...
    def step(
        self,
        token_ids: _I32,
        query_start: _I32,
        num_computed: _I32,
        block_tables: _I32,
        block_copies: _I32,
        wanted_rows: _I32,
        rotary: list[tuple[_F32, _F32]],
        logits: _F32,
        hidden: _F32,
        embedding_positions: _I32,
        embeddings: _F32,
        slot_copies: _I32,
        tree_depths: _I32,
        tree_masks: npt.NDArray[np.uint64],
        adapter_slots: _I32 | None = None,
        received: _F32 | None = None,
        sent: _F32 | None = None,
    ) -> None: ...
    def row_states(self, rows: _I32, out: _F32) -> None: ...
    def choose(
        self,
        logits: _F32,
        temperature: _F32,
        top_k: _I32,
        top_p: _F32,
        min_p: _F32,
        uniforms: _F64,
        tokens: _I32,
        masked_rows: _I32,
        masks: _I32,
    ) -> None: ...

def matmul(matrix: Matrix, x: _F32, out: _F32, isa: str, threads: int = 1, repeats: int = 1) -> None: ...
def multiply_each(matrices: list[Matrix], x: _F32, isa: str, threads: int = 1, repeats: int = 1) -> None: ...
def read_memory(array: _U8, threads: int, repeats: int = 1) -> float: ...
def loop_seconds(threads: int, loops: int, cpus: Sequence[Sequence[int]] = ()) -> float: ...
def bound_cpus(threads: int, cpus: Sequence[Sequence[int]]) -> list[list[int]]: ...
def touch_panels(data: _U8, panels: int, cpus: Sequence[Sequence[int]]) -> None: ...
def panel_owners(panels: int, threads: int) -> list[int]: ...
def chunks_by_thread(
    kind: str, outputs: int, inputs: int, rows: int, threads: int, isa: str
) -> list[list[tuple[int, int, int, int]]]: ...
def interleave(memory: _U8, nodes: list[int]) -> bool: ...
def count_chunks(counts: list[int], threads: int, calls: int = 1, alone: bool = False) -> list[int]: ...
def rms_norm(x: _F32, weight: _F32, eps: float, out: _F32, isa: str) -> None: ...
def layer_norm(x: _F32, weight: _F32, bias: _F32 | None, eps: float, out: _F32, isa: str) -> None: ...
def activate(activation: str, x: _F32, out: _F32, isa: str) -> None: ...
def softcap(x: _F32, cap: float, isa: str) -> None: ...
def gated(activation: str, gate_up: _F32, out: _F32, isa: str) -> None: ...
def rotate(head: _F32, cos: _F32, sin: _F32, isa: str) -> None: ...
def matrix_row(matrix: Matrix, row: int, out: _F32, isa: str) -> None: ...

class EncoderLayer:
    def __init__(
        self,
        attention_norm: _F32 | None,
        qkv: Matrix,
        output: Matrix,
        mlp_norm: _F32,
        gate: Matrix | None,
        up: Matrix,
        down: Matrix,
        reach: int = -1,
        rotary: int = -1,
    ) -> None: ...

class Encoder:
    def __init__(
        self,
        *,
        hidden_size: int,
        intermediate_size: int,
        heads: int,
        head_dim: int,
        norm_eps: float,
        attention_scale: float,
        activation: str,
        norm_first: bool,
        layers: list[EncoderLayer],
        cache_kind: str,
        isa: str,
        threads: int,
        cpus: Sequence[Sequence[int]] = (),
    ) -> None: ...
    def run(self, x: _F32, starts: _I32, rotary: list[tuple[_F32, _F32]]) -> None: ...

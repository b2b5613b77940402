"""Tensors in shared memory: visibility, copies and reuse."""

from __future__ import annotations

import gc
import os

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from neso.backends.python.process.codec import INLINE_BYTES, MessageCodec
from neso.backends.python.process.shared_memory import ALIGNMENT, KEPT, Arena, make_file
from neso.server.errors import Cancelled, InternalError
from neso.server.inference_request import InferenceRequest
from neso.server.inference_response import InferenceResponse
from neso.server.tensor import DataType, Tensor

SIZE = 1 << 16


class Pair:
    """Both sides of a channel in one process, with immediate releases."""

    def __init__(self) -> None:
        files = make_file("test"), make_file("test")
        first, second = (Arena(file, SIZE, SIZE) for file in files)
        self.left = MessageCodec(first, files[1], second.release)
        self.right = MessageCodec(second, files[0], first.release)

    @property
    def in_use(self) -> int:
        gc.collect()
        return self.left.own.in_use + self.right.own.in_use


def floats(count: int) -> Tensor:
    return Tensor.from_numpy("T", np.arange(count, dtype=np.float32))


TENSORS = [
    floats(1),
    floats(0),
    floats(SIZE),
    Tensor.from_numpy("T", np.arange(24, dtype=np.int64).reshape(2, 3, 4)[:, ::2]),
    Tensor.from_numpy("T", np.ones((70, 70), np.float64).T),
    Tensor.from_numpy("T", np.array(True)),
    Tensor.from_numpy("T", np.ones(SIZE, ml_dtypes.bfloat16)),
    Tensor.from_strings("T", ["", "äöü", "x" * SIZE]),
    Tensor.from_numpy("T", np.array([[b"a\0b"], [b""]], np.object_)),
]


@pytest.mark.parametrize("tensor", TENSORS, ids=lambda t: f"{t.datatype.value}-{t.shape}")
def test_tensors_round_trip(tensor):
    pair = Pair()
    got = pair.right.unpack(pair.left.pack(tensor))
    assert (got.name, got.datatype, got.shape) == (tensor.name, tensor.datatype, tensor.shape)
    assert got.array.dtype == tensor.array.dtype and np.array_equal(got.array, tensor.array)
    del got
    assert pair.in_use == 0


def test_only_large_tensors_use_shared_memory():
    pair = Pair()
    assert pair.left.pack(floats(INLINE_BYTES // 4)).block is None
    assert pair.left.pack(floats(INLINE_BYTES // 4 + 1)).data is None


def test_memory_is_held_while_a_view_exists():
    pair = Pair()
    got = pair.right.unpack(pair.left.pack(floats(SIZE)))
    part = got.array.reshape(2, -1)[1:, ::2].view(np.int32)
    view = memoryview(part)
    del got, part
    assert pair.in_use == SIZE * 4
    assert view.shape == (1, SIZE // 4)
    del view
    assert pair.in_use == 0


def test_torch_tensor_shares_and_holds_the_memory():
    torch = pytest.importorskip("torch")
    pair = Pair()
    got = pair.right.unpack(pair.left.pack(floats(SIZE)))
    tensor = torch.from_dlpack(got.array)[5:]
    got.array[5] = 77
    del got
    assert pair.in_use == SIZE * 4 and tensor[0] == 77
    del tensor
    assert pair.in_use == 0


def test_received_tensor_is_sent_back_without_a_copy():
    pair = Pair()
    sent = pair.left.pack(floats(SIZE))
    got = pair.right.unpack(sent)
    back = pair.right.pack(Tensor.from_numpy("OUT", got.array[SIZE // 2 :]))
    assert back.block.returned and back.block.offset == sent.block.offset and back.start == SIZE * 2
    again = pair.left.unpack(back)
    assert pair.right.own.size == 0
    del got
    assert pair.in_use == SIZE * 4 and again.array[0] == SIZE // 2
    del again
    assert pair.in_use == 0


def test_pages_are_returned_when_no_block_is_used():
    file = make_file("test")
    arena = Arena(file, SIZE, SIZE)

    def pages() -> int:
        return os.fstat(file.fileno()).st_blocks * 512

    blocks = [arena.allocate(KEPT // 2) for _ in range(4)]
    for _, memory in blocks:
        memory[:] = 1
    assert pages() >= 2 * KEPT
    for block, _ in blocks[1:]:
        arena.release(block.offset)
    arena.trim()
    assert pages() >= 2 * KEPT, "a block is in use"
    arena.release(blocks[0][0].offset)
    arena.trim()
    assert KEPT // 2 <= pages() <= KEPT
    again, memory = arena.allocate(KEPT)
    assert not memory.any() or again.offset < KEPT
    memory[:] = 2
    assert (memory == 2).all()


def test_released_memory_is_reused():
    pair = Pair()
    for _ in range(100):
        pair.right.unpack(pair.left.pack(floats(SIZE // 8)))
    assert pair.left.own.size == SIZE


def test_memory_growth_needs_few_segments():
    arena = Arena(make_file("test"), SIZE, SIZE)
    blocks = [arena.allocate(SIZE)[0] for _ in range(1000)]
    assert len({block.segment for block in blocks}) < 12 and arena.size < 2100 * SIZE


def test_exhausted_memory_fails_the_request():
    pair = Pair()
    pair.left.own.close()
    with pytest.raises(InternalError, match="no shared memory for tensor 'T'"):
        pair.left.pack(floats(SIZE))


def test_the_file_cannot_shrink():
    file = make_file("test")
    file.truncate(4096)
    with pytest.raises(OSError):
        os.ftruncate(file.fileno(), 0)


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 3 * SIZE)), max_size=60))
def test_blocks_never_overlap_and_are_all_freed(steps):
    arena = Arena(make_file("test"), SIZE, SIZE)
    live: dict[int, tuple[int, np.ndarray]] = {}
    for number, (allocate, size) in enumerate(steps):
        if allocate or not live:
            block, memory = arena.allocate(size)
            memory[:] = number % 251
            assert block.offset % ALIGNMENT == 0 and block.offset not in live
            live[block.offset] = number % 251, memory
        else:
            offset = list(live)[size % len(live)]
            mark, memory = live.pop(offset)
            assert (memory == mark).all()
            arena.release(offset)
    for offset, (mark, memory) in live.items():
        assert (memory == mark).all()
        arena.release(offset)
    assert arena.in_use == 0
    size = arena.size
    if size:
        arena.allocate(SIZE)  # merged into one block
        assert arena.size == size


def test_requests_and_responses_round_trip():
    pair = Pair()
    request = InferenceRequest(
        "m",
        {"A": floats(3), "T": floats(SIZE)},
        "2",
        "id",
        ("O",),
        {"a": True, "b": 1.5},
        3,
        9,
        "seq",
        True,
        False,
    )
    got = pair.right.unpack_request(pair.left.pack_request(request, None))
    for field in (
        "model_name",
        "model_version",
        "id",
        "requested_outputs",
        "parameters",
        "priority",
        "timeout_us",
    ):
        assert getattr(got, field) == getattr(request, field)
    assert (got.sequence_id, got.sequence_start, got.sequence_end) == ("seq", True, False)
    assert got.inputs["T"].array[-1] == SIZE - 1
    parameters = {"n": np.float64(2), "i": 3}
    response = InferenceResponse(
        "m", "1", outputs=[floats(2)], parameters=parameters, error=Cancelled("no"), created_ns=5
    )
    packed = pair.left.pack_response(response)
    assert type(packed.parameters["n"]) is float
    again = pair.right.unpack_response(packed)
    assert (again.error.message, again.error.code, again.created_ns, again.final) == (
        "no",
        Cancelled.code,
        5,
        False,
    )
    assert again.outputs[0].datatype is DataType.FP32

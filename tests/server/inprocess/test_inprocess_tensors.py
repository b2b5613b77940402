"""In-process tensors: conversions and shared memory."""

from __future__ import annotations

import ctypes
import gc
import sys
import weakref

import ml_dtypes
import numpy as np
import pytest

import neso
from neso.server.errors import InvalidArgument, Unsupported
from neso.server.inprocess import MemoryBuffer, MemoryType
from neso.server.inprocess.dlpack import DLDeviceType, to_numpy
from neso.server.inprocess.tensor import make_input, parse_device
from neso.server.tensor import DataType

NUMBERS = [datatype for datatype in DataType if datatype is not DataType.BYTES]


def address(array):
    return array.__array_interface__["data"][0]


@pytest.mark.parametrize(
    ("value", "datatype", "expected"),
    [
        ([True], DataType.BOOL, [True]),
        ([1, 2], DataType.INT32, [1, 2]),
        ([1, 2], DataType.UINT8, [1, 2]),
        ([1], DataType.FP16, [1]),
        ([[1.5]], DataType.FP32, [[1.5]]),
        ([1.5], DataType.BF16, [1.5]),
        (["ü", b"b"], DataType.BYTES, ["ü".encode(), b"b"]),
        ("text", DataType.BYTES, b"text"),
        ([], DataType.INT32, []),
        ([1.5], None, [1.5]),
    ],
)
def test_plain_values_become_the_model_datatype(value, datatype, expected):
    tensor = make_input("X", value, datatype)
    assert datatype is None or tensor.datatype is datatype
    assert tensor.array.tolist() == expected


@pytest.mark.parametrize(
    ("value", "datatype"),
    [
        ([1.5], DataType.INT32),
        ([1], DataType.BOOL),
        ([300], DataType.UINT8),
        ([-1], DataType.UINT8),
        ([[1], [1, 2]], DataType.INT32),
        ([1], DataType.BYTES),
        ([None], DataType.INT32),
    ],
)
def test_mismatched_plain_values_are_rejected(value, datatype):
    with pytest.raises(InvalidArgument):
        make_input("X", value, datatype)


def test_arrays_keep_their_datatype():
    assert make_input("X", np.zeros(1, np.int64), DataType.INT32).datatype is DataType.INT64
    assert make_input("X", np.zeros(1, ml_dtypes.bfloat16), None).datatype is DataType.BF16
    torch = pytest.importorskip("torch")
    assert make_input("X", torch.ones(2, dtype=torch.int32), None).array.tolist() == [1, 1]


@pytest.mark.parametrize("datatype", NUMBERS)
def test_numpy_shares_memory_both_ways(datatype):
    array = np.zeros((2, 3), datatype.dtype)
    tensor = neso.Tensor.from_object(array)
    assert (tensor.datatype, tensor.shape, tensor.size) == (datatype, (2, 3), array.nbytes)
    assert tensor.data_ptr == address(array) == address(np.asarray(tensor)) == address(tensor.numpy())
    assert (tensor.memory_type, tensor.memory_type_id) == (MemoryType.CPU, 0)
    np.asarray(tensor)[0, 0] = 1
    assert array[0, 0] == 1


@pytest.mark.parametrize(
    "datatype", [d for d in NUMBERS if not d.value.startswith("UINT") or d.value == "UINT8"]
)
def test_torch_shares_memory_both_ways(datatype):
    torch = pytest.importorskip("torch")
    names = {"FP16": "float16", "FP32": "float32", "FP64": "float64", "BF16": "bfloat16"}
    given = torch.ones(2, 3, dtype=getattr(torch, names.get(datatype.value, datatype.value.lower())))
    tensor = neso.Tensor.from_dlpack(given)
    assert (tensor.datatype, tensor.shape) == (datatype, (2, 3))
    assert tensor.numpy().astype(np.float32).tolist() == [[1, 1, 1], [1, 1, 1]]
    back = torch.from_dlpack(tensor)
    assert tensor.data_ptr == given.data_ptr() == back.data_ptr() and back.dtype == given.dtype
    back[1, 2] = 0
    assert not given[1, 2]
    assert make_input("X", given, None).array.__array_interface__["data"][0] == given.data_ptr()


def test_memory_lives_as_long_as_a_view_of_it():
    torch = pytest.importorskip("torch")
    given = torch.full((1000,), 7.0)
    alive = weakref.ref(given)
    view = np.from_dlpack(neso.Tensor.from_dlpack(given))
    del given
    gc.collect()
    assert view.sum() == 7000
    del view
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_view_keeps_the_tensor_alive(dtype):
    class WeaklyReferenced(neso.Tensor):
        __slots__ = ("__weakref__",)

    tensor = WeaklyReferenced.from_object(np.ones(3, dtype))
    alive = weakref.ref(tensor)
    view = to_numpy(tensor)
    del tensor
    assert alive() is not None and view.tolist() == [1, 1, 1]
    del view
    assert alive() is None


def test_dlpack_does_not_leak():
    array = np.ones(10, ml_dtypes.bfloat16)
    before = sys.getrefcount(array)
    for _ in range(100):
        np.from_dlpack(neso.Tensor.from_object(np.ones(3)))
        neso.Tensor.from_object(array).__dlpack__()
        neso.Tensor.from_object(array).__dlpack__(max_version=(1, 0))
    gc.collect()
    assert sys.getrefcount(array) == before


def test_non_contiguous_arrays_are_copied():
    array = np.arange(6, dtype=np.float32).reshape(2, 3).T
    tensor = neso.Tensor.from_object(array)
    assert tensor.numpy().tolist() == array.tolist() and tensor.numpy().flags.c_contiguous
    torch = pytest.importorskip("torch")
    assert neso.Tensor.from_dlpack(torch.arange(6).reshape(2, 3).T).numpy().tolist() == [
        [0, 3],
        [1, 4],
        [2, 5],
    ]


def test_strings():
    tensor = neso.Tensor.from_string_array([["ü", "b"], ["", "d"]])
    assert (tensor.datatype, tensor.shape) == (DataType.BYTES, (2, 2))
    assert tensor.to_string_array().tolist() == [["ü", "b"], ["", "d"]]
    assert tensor.to_bytes_array().tolist() == [["ü".encode(), b"b"], [b"", b"d"]]
    assert tensor.size == 4 * 4 + 4 == tensor.memory_buffer.size
    raw = ctypes.string_at(tensor.data_ptr, tensor.size)  # the address stays valid
    assert raw == b"\x02\0\0\0\xc3\xbc\x01\0\0\0b\0\0\0\0\x01\0\0\0d"
    assert neso.Tensor.from_bytes_array([b"a\0", "b"]).to_bytes_array().tolist() == [b"a\0", b"b"]
    assert neso.Tensor.from_bytes_array(np.array(["x", "yz"])).to_string_array().tolist() == ["x", "yz"]
    assert neso.Tensor.from_bytes_array([]).shape == (0,)
    with pytest.raises(InvalidArgument, match="int64 elements"):
        neso.Tensor.from_bytes_array([1])
    with pytest.raises(InvalidArgument, match="expected text or bytes"):
        neso.Tensor.from_bytes_array(np.array(["a", 1], np.object_))
    with pytest.raises(InvalidArgument, match="cannot be made"):
        neso.Tensor.from_string_array([["a"], ["b", "c"]])
    with pytest.raises(InvalidArgument, match="not UTF-8"):
        neso.Tensor.from_bytes_array([b"\xff"]).to_string_array()
    with pytest.raises(InvalidArgument, match="to_bytes_array"):
        np.from_dlpack(tensor)


def test_plain_values():
    assert neso.Tensor.from_object([1, 2]).datatype is DataType.INT64
    assert neso.Tensor.from_object([1, 2], DataType.FP16).datatype is DataType.FP16
    assert neso.Tensor.from_object("text").to_string_array().item() == "text"
    tensor = neso.Tensor.from_object([1.5])
    assert neso.Tensor.from_object(tensor).data_ptr == tensor.data_ptr
    assert "FP64" in repr(tensor)


def test_unsupported_objects():
    with pytest.raises(InvalidArgument, match="complex128 has no KServe datatype"):
        neso.Tensor.from_object(np.zeros(1, complex))
    with pytest.raises(InvalidArgument, match="int has no __dlpack__"):
        neso.Tensor.from_dlpack(1)
    torch = pytest.importorskip("torch")
    with pytest.raises(InvalidArgument, match="gradient"):
        neso.Tensor.from_dlpack(torch.zeros(1, requires_grad=True))
    with pytest.raises(InvalidArgument, match="input 'X' cannot be read through DLPack"):
        make_input("X", torch.zeros(1, dtype=torch.float8_e4m3fn), None)


def test_memory_buffers():
    array = np.arange(6, dtype=np.int16)
    buffer = MemoryBuffer.from_dlpack(array)
    assert (buffer.data_ptr, buffer.size, buffer.memory_type) == (address(array), 12, MemoryType.CPU)
    assert buffer.owner is array
    assert MemoryBuffer.from_dlpack(array[2:]).data_ptr == address(array) + 4
    assert MemoryBuffer.from_dlpack(np.zeros((3, 0))).size == 0
    with pytest.raises(InvalidArgument, match="contiguous"):
        MemoryBuffer.from_dlpack(array[::2])
    with pytest.raises(InvalidArgument, match="DLPack"):
        MemoryBuffer.from_dlpack([1])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("cpu", (MemoryType.CPU, 0)),
        ("CPU_PINNED", (MemoryType.CPU_PINNED, 0)),
        ("gpu:3", (MemoryType.GPU, 3)),
        (MemoryType.GPU, (MemoryType.GPU, 0)),
        ((MemoryType.GPU, 1), (MemoryType.GPU, 1)),
        ((DLDeviceType.kDLCUDA, 2), (MemoryType.GPU, 2)),
        ((DLDeviceType.kDLCPU, 0), (MemoryType.CPU, 0)),
    ],
)
def test_devices(text, expected):
    assert parse_device(text) == expected


@pytest.mark.parametrize("text", ["tpu", "", "gpu:x", "gpu:-1", "gpu:1:2", (1, 2, 3), 7, None, ("gpu", 0)])
def test_invalid_devices(text):
    with pytest.raises(InvalidArgument, match="invalid memory type"):
        parse_device(text)


def test_move_to_the_same_device():
    tensor = neso.Tensor.from_object([1.0])
    assert tensor.to_host() is tensor and tensor.to_device("cpu_pinned") is tensor
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        with pytest.raises(Unsupported, match="no such GPU"):
            tensor.to_device("gpu")


class GpuArray:
    """Memory that numpy cannot read."""

    def __init__(self, array):
        self.array = array

    def __dlpack__(self, **options):
        return self.array.__dlpack__()

    def __dlpack_device__(self):
        return (DLDeviceType.kDLCUDA, 0)


def test_missing_gpu():
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(InvalidArgument, match="DLPack"):
        neso.Tensor.from_dlpack(GpuArray(np.zeros(1)))


def test_a_gpu_without_torch(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    for make in (neso.Tensor.from_dlpack, lambda owner: make_input("X", owner, None)):
        with pytest.raises(Unsupported, match=r"neso-server\[torch\]"):
            make(GpuArray(np.zeros(1)))

"""CUDA shared memory with a fake driver whose memory is host memory. tests/gpu uses a real GPU."""

from __future__ import annotations

import ctypes
import gc

import numpy as np
import pytest
from fake_cuda import FakeCuda

from neso.server.errors import ErrorCode, ServerError
from neso.server.shared_memory.cuda import CudaDriver
from neso.server.shared_memory.regions import SharedMemory
from neso.server.tensor import DataType, Tensor


@pytest.fixture
def cuda() -> FakeCuda:
    return FakeCuda()


@pytest.fixture
def manager(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> SharedMemory:
    driver = CudaDriver(cuda)
    monkeypatch.setattr(CudaDriver, "load", lambda: driver)
    return SharedMemory(enabled=True)


def test_status_lists_registered_regions(manager, cuda):
    handle, _ = cuda.allocate(64)
    assert manager.cuda_status() == []
    manager.register_cuda("a", handle, 1, 48)
    [region] = manager.cuda_status("a")
    assert (region.name, region.device_id, region.byte_size) == ("a", 1, 48)
    assert manager.status() == [] and manager.cuda_status() == [region]
    manager.unregister()  # the system regions
    assert manager.cuda_status() == [region]
    manager.unregister_cuda()
    del region
    gc.collect()
    assert manager.cuda_status() == [] and cuda.opened == [] and cuda.depth == 0


def test_tensors_are_copied_from_and_to_the_device(manager, cuda):
    handle, memory = cuda.allocate(64)
    ctypes.memmove(memory, np.arange(4, dtype=np.float32).tobytes(), 16)
    manager.register_cuda("a", handle, 0, 64)
    tensor = manager.window("a", 0, 16).read("X", DataType.FP32, (4,))
    assert tensor.array.tolist() == [0, 1, 2, 3]
    assert manager.window("a", 32, 32).write(Tensor.from_numpy("Y", tensor.array * 2)) == 16
    assert np.frombuffer(bytes(memory)[32:48], np.float32).tolist() == [0, 2, 4, 6]
    assert manager.window("a", 48, 16).write(Tensor.from_strings("S", ["ab"])) == 6
    strings = manager.window("a", 48, 6).read("S", DataType.BYTES, (1,))
    assert strings.array.tolist() == [b"ab"]


def test_a_region_stays_mapped_while_a_request_uses_it(manager, cuda):
    handle, _ = cuda.allocate(8)
    manager.register_cuda("a", handle, 0, 8)
    window = manager.window("a", 0, 8)
    manager.unregister_cuda("a")
    manager.unregister_cuda("a")
    gc.collect()
    assert len(cuda.opened) == 1
    assert window.read("X", DataType.INT64, (1,)).array.tolist() == [0]
    del window
    gc.collect()
    assert cuda.opened == []


@pytest.mark.parametrize(
    ("handle", "device", "size", "message"),
    [
        (b"\x01" * 64, 0, 65, "invalid args"),
        (b"\x01" * 64, 0, 0, "invalid args"),
        (b"\x01" * 64, 2, 8, "invalid args"),
        (b"\x01" * 63, 0, 8, "invalid args"),
        (b"\x09" * 64, 0, 8, "CUDA_ERROR_INVALID_HANDLE"),
    ],
)
def test_invalid_registrations(manager, cuda, handle, device, size, message):
    cuda.allocate(64)
    with pytest.raises(
        ServerError, match=f"failed to register CUDA shared memory region: 'a', {message}"
    ) as caught:
        manager.register_cuda("a", handle, device, size)
    assert caught.value.code is ErrorCode.INVALID_ARG
    del caught
    gc.collect()
    assert cuda.opened == [] and cuda.depth == 0


def test_names_are_shared_with_system_regions(manager, cuda):
    handle, _ = cuda.allocate(64)
    manager.register_cuda("a", handle, 0, 8)
    for register in (
        lambda: manager.register("a", "/key", 0, 8),
        lambda: manager.register_cuda("a", handle, 0, 8),
    ):
        with pytest.raises(ServerError, match="shared memory region 'a' already in manager"):
            register()


def test_windows_out_of_range(manager, cuda):
    handle, _ = cuda.allocate(64)
    manager.register_cuda("a", handle, 0, 16)
    for offset, size, message in ((16, 1, "Invalid offset for"), (8, 9, r"Invalid offset \+ byte size for")):
        with pytest.raises(ServerError, match=message):
            manager.window("a", offset, size)


def test_failed_copies_fail_the_request(manager, cuda):
    handle, _ = cuda.allocate(16)
    manager.register_cuda("a", handle, 0, 16)
    window = manager.window("a", 0, 16)
    cuda.failing = "copies"
    with pytest.raises(
        ServerError, match="failed to read CUDA shared memory region 'a': CUDA_ERROR_INVALID_HANDLE"
    ):
        window.read("X", DataType.INT64, (2,))
    with pytest.raises(ServerError, match="failed to write CUDA shared memory region 'a'"):
        window.write(Tensor.from_numpy("X", np.zeros(2, np.int64)))
    assert cuda.depth == 0


@pytest.mark.parametrize(("devices", "failing"), [(0, ""), (1, "cuInit")])
def test_no_driver_without_a_gpu(monkeypatch, devices, failing):
    library = FakeCuda(devices)
    library.failing = failing
    monkeypatch.setattr(ctypes, "CDLL", lambda name: library)
    assert CudaDriver.load() is None


async def test_the_extension_is_advertised_with_a_gpu(start_core, cuda, monkeypatch):
    driver = CudaDriver(cuda)
    monkeypatch.setattr(CudaDriver, "load", lambda: driver)
    assert "cuda_shared_memory" in (await start_core(allow_client_shm=True)).metadata().extensions
    assert "cuda_shared_memory" not in (await start_core()).metadata().extensions
    monkeypatch.setattr(CudaDriver, "load", lambda: None)
    assert "cuda_shared_memory" not in (await start_core(allow_client_shm=True)).metadata().extensions

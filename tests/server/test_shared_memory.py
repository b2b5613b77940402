"""Shared memory regions: registration, reads, writes, and lifetime of the mapping."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.shared_memory import SharedMemory as Memory
from pathlib import Path

import numpy as np
import pytest

from neso.server.errors import ErrorCode, ServerError
from neso.server.shared_memory.cuda import CudaDriver
from neso.server.shared_memory.regions import SharedMemory
from neso.server.tensor import DataType, Tensor

SIZE = 3 * 4096


@pytest.fixture
def memory() -> Iterator[Memory]:
    memory = Memory(f"/neso_unit_{os.getpid()}", create=True, size=SIZE)
    yield memory
    memory.close()
    memory.unlink()


@pytest.fixture
def manager() -> SharedMemory:
    return SharedMemory(enabled=True)


def key(memory: Memory) -> str:
    return f"/{memory.name.removeprefix('/')}"


def is_mapped(memory: Memory) -> int:
    """Return how often the object is mapped in this process, except by the test itself."""
    maps = Path("/proc/self/maps").read_text()
    return maps.count(key(memory)) - 1


@contextmanager
def refused(code: ErrorCode, message: str) -> Iterator[None]:
    with pytest.raises(ServerError, match=message) as caught:
        yield
    assert caught.value.code is code


def test_status_lists_registered_regions(manager, memory):
    assert manager.status() == []
    manager.register("a", key(memory), 0, SIZE)
    manager.register("b", key(memory), 100, 16)
    (b,) = manager.status("b")
    assert (b.name, b.key, b.offset, b.byte_size) == ("b", key(memory), 100, 16)
    assert [region.name for region in manager.status()] == ["a", "b"]
    manager.unregister("a")
    manager.unregister("a")
    assert [region.name for region in manager.status()] == ["b"]
    manager.unregister()
    del b  # which keeps it mapped
    assert manager.status() == [] and not is_mapped(memory)


def test_invalid_registrations(manager, memory):
    manager.register("a", key(memory), 0, 8)
    with refused(ErrorCode.ALREADY_EXISTS, "shared memory region 'a' already in manager"):
        manager.register("a", key(memory), 0, 8)
    for offset, size in ((0, SIZE + 1), (SIZE, 1), (1, SIZE), (1 << 63, 8), (0, 1 << 64), (0, 0)):
        with refused(ErrorCode.INVALID_ARG, "failed to register shared memory region 'b': invalid args"):
            manager.register("b", key(memory), offset, size)
    for empty in ("", "/", "///"):
        with refused(
            ErrorCode.INVALID_ARG,
            f"cannot register shared memory region 'b' - invalid shm key '{empty}'",
        ):
            manager.register("b", empty, 0, 8)
    with refused(ErrorCode.NOT_FOUND, "Unable to find system shared memory region: 'b'"):
        manager.status("b")


def test_keys_are_restricted_to_shared_memory(manager, memory, tmp_path):
    link = Path("/dev/shm") / f"neso_link_{os.getpid()}"
    (tmp_path / "file").write_bytes(bytes(8))
    link.symlink_to(tmp_path / "file")
    name = key(memory)[1:]
    keys = ["/.", "/..", "/../shm/" + name, "//" + name, f"/./{name}", "/../../etc/passwd", "/a\0b"]
    try:
        for each in [*keys, "/nothing", "/\udc80", f"/{link.name}", "/" + "x" * 300, str(tmp_path / "file")]:
            with pytest.raises(ServerError) as caught:
                manager.register("a", each, 0, 8)
            assert caught.value.message == f"Unable to open shared memory region: '{each}'"
    finally:
        link.unlink()


@pytest.mark.parametrize("offset", [0, 8, 4096, 5000])
def test_tensors_are_views_of_the_region(manager, memory, offset):
    values = np.arange(6, dtype=np.float32)
    memory.buf[offset + 8 : offset + 32] = values.tobytes()
    manager.register("a", key(memory), offset, 64)
    tensor = manager.window("a", 8, 24).read("X", DataType.FP32, (2, 3))
    assert tensor.array.tolist() == values.reshape(2, 3).tolist()
    memory.buf[offset + 8 : offset + 12] = np.float32(7).tobytes()
    assert tensor.array[0, 0] == 7 and not tensor.array.flags.writeable


def test_unaligned_tensors_are_copied(manager, memory):
    manager.register("a", key(memory), 0, 64)
    memory.buf[1:9] = np.float64(2.5).tobytes()
    tensor = manager.window("a", 1, 8).read("X", DataType.FP64, (1,))
    assert tensor.array.flags.aligned and tensor.array[0] == 2.5


def test_bytes_in_both_directions(manager, memory):
    manager.register("a", key(memory), 0, 64)
    tensor = Tensor.from_strings("X", ["one", "", "three"])
    assert manager.window("a", 4, 60).write(tensor) == tensor.byte_size == 20
    again = manager.window("a", 4, 20).read("X", DataType.BYTES, (3,))
    assert again.array.tolist() == [b"one", b"", b"three"]


@pytest.mark.parametrize(
    "array",
    [
        np.float32(3),
        np.zeros((0, 2), np.int8),
        np.array([True, False]),
        np.arange(6, dtype=np.int16).reshape(2, 3).T,
    ],
)
def test_writing(manager, memory, array):
    manager.register("a", key(memory), 0, 64)
    array = np.asarray(array)
    tensor = Tensor("Y", DataType.of_numpy(array.dtype), array)
    assert manager.window("a", 3, 61).write(tensor) == array.nbytes
    assert bytes(memory.buf[3 : 3 + array.nbytes]) == array.tobytes()


def test_out_of_range(manager, memory):
    with refused(ErrorCode.NOT_FOUND, "^Unable to find shared memory region: 'a'$"):
        manager.window("a", 0, 8)
    manager.register("a", key(memory), 0, 64)
    with refused(ErrorCode.INVALID_ARG, r"Invalid offset \+ byte size for shared memory region: 'a'"):
        manager.window("a", 0, 65)
    with refused(ErrorCode.INVALID_ARG, r"Invalid offset \+ byte size for shared memory region: 'a'"):
        manager.window("a", 63, (1 << 64) - 1)
    with refused(ErrorCode.INVALID_ARG, "Invalid offset for shared memory region: 'a'"):
        manager.window("a", 64, 1)
    with refused(ErrorCode.INVALID_ARG, "input byte size mismatch for input 'X'. Expected 4, got 8"):
        manager.window("a", 0, 8).read("X", DataType.FP32, (1,))
    message = r"for output 'Y' \(4 bytes\) should be at least 8 bytes to hold the results"
    with refused(ErrorCode.INTERNAL, message):
        manager.window("a", 0, 4).write(Tensor.from_numpy("Y", np.zeros(2, np.float32)))
    assert bytes(memory.buf[:8]) == bytes(8)


def test_a_truncated_object_is_an_error(manager, memory):
    manager.register("a", key(memory), 0, SIZE)
    window = manager.window("a", 0, SIZE)
    os.truncate(f"/dev/shm{key(memory)}", 4096)
    for call in (
        lambda: window.read("X", DataType.INT8, (SIZE,)),
        lambda: window.write(Tensor.from_numpy("Y", np.zeros(SIZE, np.int8))),
        lambda: manager.window("a", 4096, 1),
    ):
        with refused(ErrorCode.INVALID_ARG, "has shrunk since it was registered"):
            call()
    assert manager.window("a", 0, 4096).byte_size == 4096


def test_a_region_stays_mapped_while_it_is_used(manager, memory):
    manager.register("a", key(memory), 0, 64)
    memory.buf[:4] = np.float32(1.5).tobytes()
    window = manager.window("a", 0, 64)
    tensor = manager.window("a", 0, 4).read("X", DataType.FP32, (1,))
    manager.unregister("a")
    window.write(Tensor.from_numpy("Y", np.array([2.5], np.float32)))
    assert memory.buf[:4] == np.float32(2.5).tobytes()
    del window
    gc.collect()
    assert is_mapped(memory) == 1 and tensor.array[0] == 2.5
    del tensor
    gc.collect()
    assert is_mapped(memory) == 0


def test_a_region_in_use_is_unregistered_when_its_windows_end(manager, memory):
    manager.register("a", key(memory), 0, 64)
    manager.register("b", key(memory), 0, 64)
    first = manager.window("a", 0, 4)
    manager.unregister()
    assert [region.name for region in manager.status()] == ["a"] and manager.status("a")
    second = manager.window("a", 8, 4)
    manager.unregister("a")
    del first
    assert [region.name for region in manager.status()] == ["a"]
    del second
    assert manager.status() == [] and is_mapped(memory) == 0
    with refused(ErrorCode.NOT_FOUND, "Unable to find shared memory region: 'a'"):
        manager.window("a", 0, 4)


def test_the_name_of_a_region_in_use_can_be_registered_again(manager, memory):
    manager.register("a", key(memory), 0, 64)
    old = manager.window("a", 0, 4)
    manager.unregister("a")
    manager.register("a", key(memory), 64, 32)
    assert [region.offset for region in manager.status()] == [64]
    memory.buf[64:68] = np.float32(3.5).tobytes()
    assert manager.window("a", 0, 4).read("X", DataType.FP32, (1,)).array[0] == 3.5
    old.write(Tensor.from_numpy("Y", np.array([2.5], np.float32)))
    assert memory.buf[:4] == np.float32(2.5).tobytes()


def test_regions_follow_those_of_another_process(manager, memory):
    other = SharedMemory(enabled=True)
    other.register("a", key(memory), 0, 64)
    manager.follow(other.registrations)
    window = manager.window("a", 0, 4)
    other.unregister("a")
    manager.follow(other.registrations)
    assert [region.name for region in manager.status()] == ["a"] and manager.registrations == {}
    other.register("a", key(memory), 128, 64)
    manager.follow(other.registrations)
    assert [region.offset for region in manager.status()] == [128]
    del window
    assert [region.offset for region in manager.status()] == [128]


def test_cuda_regions_are_rejected_without_a_gpu(manager, monkeypatch):
    monkeypatch.setattr(CudaDriver, "load", lambda: None)
    assert manager.cuda_status() == []
    manager.unregister_cuda()
    with refused(ErrorCode.NOT_FOUND, "Unable to find cuda shared memory region: 'c'"):
        manager.cuda_status("c")
    message = "failed to register CUDA shared memory region: 'c', GPUs not supported"
    with refused(ErrorCode.INVALID_ARG, message):
        manager.register_cuda("c", bytes(64), 0, 8)


def test_all_operations_are_rejected_when_disabled(memory):
    manager = SharedMemory(enabled=False)
    for call in (
        manager.status,
        manager.unregister,
        manager.cuda_status,
        manager.unregister_cuda,
        lambda: manager.register("a", key(memory), 0, 8),
        lambda: manager.register_cuda("a", bytes(64), 0, 8),
        lambda: manager.window("a", 0, 8),
    ):
        with refused(ErrorCode.UNSUPPORTED, "disabled; start the server with --allow-client-shm=true"):
            call()


def test_follow_registers_and_removes_regions(manager, memory):
    other = SharedMemory(enabled=True)
    other.register("a", key(memory), 0, SIZE)
    other.register("b", key(memory), 0, 16)
    manager.follow(other.registrations)
    other.unregister("a")
    other.unregister("b")
    other.register("b", key(memory), 16, 16)
    manager.follow(other.registrations)
    assert [(region.name, region.offset) for region in manager.status()] == [("b", 16)]
    other.unregister()
    manager.follow(other.registrations)
    assert manager.status() == [] and manager.registrations == other.registrations == {}


def test_follow_skips_deleted_regions(manager, memory, caplog):
    other = SharedMemory(enabled=True)
    deleted = Memory(f"/neso_deleted_{os.getpid()}", create=True, size=SIZE)
    other.register("deleted", key(deleted), 0, SIZE)
    other.register("kept", key(memory), 0, SIZE)
    deleted.close()
    deleted.unlink()
    manager.follow(other.registrations)
    manager.follow(other.registrations)
    assert [region.name for region in manager.status()] == ["kept"]
    assert (
        caplog.text.count("shared memory region 'deleted' is not available") == 1
    )  # once, not at each change
    other.unregister("deleted")
    manager.follow(other.registrations)
    other.register("deleted", key(memory), 0, SIZE)
    manager.follow(other.registrations)
    assert len(manager.status()) == 2

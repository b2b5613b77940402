"""Tensors that workers keep: shared memory, sockets, references in requests and responses."""

from __future__ import annotations

import asyncio
import gc
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import ml_dtypes
import msgspec
import numpy as np
import pytest
from eventually import until

import neso.server.processes.messages as wire
from neso.cluster.stages.manifold import Manifold, add_mapped, pack_response, unpack_request
from neso.cluster.stages.messages import Outcome, Release, Task
from neso.cluster.stages.tensors import (
    MIN_KEPT_BYTES,
    RemoteArray,
    TensorReader,
    TensorRef,
    TensorServer,
    TensorStore,
    map_tensor,
    remote_ref,
)
from neso.server.errors import LostTensor
from neso.server.inference_request import InferenceRequest
from neso.server.inference_response import InferenceResponse
from neso.server.tensor import Tensor

LARGE = np.arange(MIN_KEPT_BYTES, dtype=np.float32).reshape(-1, 4)
TOKEN = "a secret of the tests"


def kept(store: TensorStore, array: Any = LARGE) -> TensorRef:
    ref = store.keep(Tensor.from_numpy("Y", array))
    assert ref is not None
    return ref


def num_files() -> int:
    """Return the number of open files of kept tensors."""
    count = 0
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            count += "neso-tensor" in os.readlink(f"/proc/self/fd/{name}")
    return count


@pytest.mark.parametrize(
    "array",
    [
        LARGE,
        np.arange(5, dtype=np.int64),
        np.array([[True, False]]),
        LARGE.astype(ml_dtypes.bfloat16),
        np.array([b"a", b"longer", b""], object),
        LARGE[:, ::2],
    ],
    ids=["float32", "int64", "bool", "bfloat16", "strings", "strided"],
)
def test_kept_tensor_is_mapped_with_its_elements(array: Any):
    tensor = map_tensor("X", kept(TensorStore("a"), array))
    assert tensor is not None and tensor.name == "X"
    np.testing.assert_array_equal(tensor.array, array)


def test_mapping_stays_when_the_tensor_is_released_and_changes_are_private():
    before, store = num_files(), TensorStore("a")
    ref = kept(store)
    first, second = map_tensor("X", ref), map_tensor("X", ref)
    assert first is not None and second is not None
    store.release(ref.number)
    store.release(ref.number)  # again: without effect
    first.array[:] = -1
    np.testing.assert_array_equal(second.array, LARGE)
    assert map_tensor("X", ref) is None
    assert store.num_bytes == 0
    del first, second
    assert num_files() == before


def test_another_file_with_the_same_number_is_not_mapped():
    store = TensorStore("a")
    ref = kept(store)
    store.release(ref.number)
    other = kept(store, LARGE + 1)
    assert other.fd == ref.fd
    assert map_tensor("X", ref) is None


def test_memory_of_a_killed_process_is_free():
    code = """
import time, numpy as np, msgspec
from neso.cluster.stages.tensors import TensorStore
from neso.server.tensor import Tensor
ref = TensorStore("a").keep(Tensor.from_numpy("Y", np.ones(100_000)))
print(msgspec.json.encode(ref).decode(), flush=True)
time.sleep(600)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as owner:
        assert owner.stdout is not None
        ref = msgspec.json.decode(owner.stdout.readline(), type=TensorRef)
        tensor = map_tensor("X", ref)
        owner.kill()
    assert map_tensor("X", ref) is None
    assert tensor is not None and tensor.array.sum() == 100_000


def test_tensor_without_memory_is_not_kept(monkeypatch: pytest.MonkeyPatch):
    def full(*arguments: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    before = num_files()
    assert TensorStore("a").keep(Tensor.from_numpy("Y", LARGE)) is None
    assert num_files() == before


# -- other hosts ------------------------------------------------------------------------------------------------


@asynccontextmanager
async def tensor_server() -> AsyncIterator[TensorStore]:
    server = TensorServer(TOKEN)
    server.store = TensorStore("a", server.address)
    running = asyncio.ensure_future(server.run())
    try:
        yield server.store
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        server.close()


def elsewhere(ref: TensorRef) -> TensorRef:
    return msgspec.structs.replace(ref, host="another host")


async def test_tensor_is_read_from_another_host():
    async with tensor_server() as store:
        tensor = await TensorReader(TOKEN, "127.0.0.1").read("X", elsewhere(kept(store)))
    np.testing.assert_array_equal(tensor.array, LARGE)


async def test_released_tensor_of_another_host_is_lost():
    async with tensor_server() as store:
        ref = elsewhere(kept(store))
        store.release(ref.number)
        with pytest.raises(LostTensor, match="worker 'a' no longer has it"):
            await TensorReader(TOKEN, "127.0.0.1").read("X", ref)


async def test_reader_with_another_token_gets_nothing():
    async with tensor_server() as store:
        with pytest.raises(LostTensor, match="cannot be read from worker 'a'"):
            await TensorReader("another secret of 12", "127.0.0.1", timeout=0.2).read(
                "X", elsewhere(kept(store))
            )


async def test_tensor_of_another_host_without_address_is_lost():
    with pytest.raises(LostTensor, match="worker 'a' has ended"):
        await TensorReader().read("X", elsewhere(kept(TensorStore("a"))))


# -- references -------------------------------------------------------------------------------------------------


class Server:
    """The server's side. `released`: numbers of released tensors."""

    def __init__(self) -> None:
        self.workers = {"a"}
        self.released: list[int] = []
        self.manifold = Manifold(lambda name: name in self.workers, self._send)

    def _send(self, name: str, message: Any) -> None:
        assert name == "a" and isinstance(message, Release)
        self.released += message.numbers

    def receive(self, store: TensorStore, keep: dict[str, bool], **outputs: Any) -> InferenceResponse:
        """Return the response that a worker with `store` sends."""
        tensors = [Tensor.from_numpy(name, array) for name, array in outputs.items()]
        request = InferenceRequest("m", {}, kept_outputs=keep)
        task = self.manifold.pack(1, 1, request, "1")
        return self.manifold.unpack(
            pack_response(task, InferenceResponse("m", "1", outputs=tensors, final=True), store, None)
        )


async def test_reference_goes_from_a_response_to_the_next_request():
    server, store = Server(), TensorStore("a")
    response = server.receive(store, {"Y": False}, Y=LARGE, SMALL=np.float32([1]))
    assert response.output("SMALL").array.tolist() == [1.0]
    output = response.output("Y")
    assert isinstance(output.array, RemoteArray) and output.shape == LARGE.shape
    assert not output.has_elements
    given = Tensor("X", output.datatype, output.array.reshape(1, *LARGE.shape))
    small = response.output("SMALL")
    task = server.manifold.pack(2, 1, InferenceRequest("n", {"X": given, "SMALL": small}), "1")
    assert list(task.refs) == ["X"] and len(task.request) < 1000
    request = unpack_request(task)
    assert add_mapped(request, "X", task.refs["X"])
    np.testing.assert_array_equal(request.inputs["X"].array, LARGE[None])
    assert request.inputs["SMALL"].array.tolist() == [1.0]


async def test_tensor_is_released_when_the_server_no_longer_refers_to_it():
    server, store = Server(), TensorStore("a")
    response = server.receive(store, {"Y": False}, Y=LARGE)
    reshaped = response.output("Y").array.reshape(-1)
    del response
    gc.collect()
    await asyncio.sleep(0)
    assert server.released == []
    del reshaped
    gc.collect()
    await until(lambda: server.released == [1])


async def test_output_that_the_server_needs_too_has_its_elements():
    server, store = Server(), TensorStore("a")
    output = server.receive(store, {"Y": True}, Y=LARGE).output("Y")
    np.testing.assert_array_equal(output.array, LARGE)
    assert remote_ref(output) is not None and output.has_elements


@pytest.mark.parametrize("keep, array", [({}, LARGE), ({"Y": False}, LARGE[:8]), ({"OTHER": False}, LARGE)])
async def test_small_outputs_and_those_of_no_other_stage_are_in_the_response(
    keep: dict[str, bool], array: Any
):
    server, store = Server(), TensorStore("a")
    output = server.receive(store, keep, Y=array).output("Y")
    np.testing.assert_array_equal(output.array, array)
    assert remote_ref(output) is None and store.num_bytes == 0


async def test_strings_are_kept():
    strings = np.array([b"x" * MIN_KEPT_BYTES, b""], object)
    server, store = Server(), TensorStore("a")
    response = server.receive(store, {"Y": False}, Y=strings)
    assert response.size > 0
    output = response.output("Y")
    task = server.manifold.pack(2, 1, InferenceRequest("n", {"Y": output}), "1")
    request = unpack_request(task)
    assert add_mapped(request, "Y", task.refs["Y"])
    assert request.inputs["Y"].array.tolist() == strings.tolist()


async def test_parts_of_a_kept_tensor_have_no_reference():
    output = Server().receive(TensorStore("a"), {"Y": True}, Y=LARGE).output("Y")
    part = Tensor("Y", output.datatype, output.array[:2])
    assert remote_ref(part) is None


async def test_input_of_a_lost_worker_fails_at_once():
    server, store = Server(), TensorStore("a")
    output = server.receive(store, {"Y": False}, Y=LARGE).output("Y")
    server.workers.clear()
    with pytest.raises(LostTensor, match="input 'X' is lost: worker 'a' has ended"):
        server.manifold.pack(
            2, 1, InferenceRequest("n", {"X": Tensor("X", output.datatype, output.array)}), "1"
        )


async def test_messages_with_pickles_are_refused():
    evil = wire.Response(1, "m", "1", "", [], {}, True, 0, None, b"pickle")
    with pytest.raises(ValueError, match="not the response of a model with tensors"):
        Server().manifold.unpack(Outcome(1, 1, msgspec.Raw(wire.encoder.encode(evil))))
    infer = wire.decoder.decode(wire.pack_request(1, InferenceRequest("m", {}), "1", ""))
    assert isinstance(infer, wire.Infer)
    infer.payload = b"pickle"
    with pytest.raises(ValueError, match="no request with tensors"):
        unpack_request(Task(1, 1, msgspec.Raw(wire.encoder.encode(infer))))

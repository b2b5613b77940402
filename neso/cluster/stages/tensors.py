"""Large tensors of stages: a worker keeps an output, and the worker of the next stage reads it there.

On one host they share memory: an anonymous file of the worker that other processes map. Other hosts read it through a
socket. The server only passes `TensorRef`s. The system frees the memory when its worker ends, however it ends, and
nobody else maps it.
"""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import os
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import zmq
import zmq.asyncio

from neso.cluster.sockets import curve_client, curve_server
from neso.engine.kv_transfer.protocol import host_id
from neso.server.errors import LostTensor
from neso.server.tensor import DataType, Tensor

MIN_KEPT_BYTES = 1 << 16
"""Smaller tensors are part of the messages."""
ANY_HOST = "tcp://*:"


class TensorRef(msgspec.Struct, frozen=True, array_like=True):
    """An output that a worker keeps.

    - worker: its name; number: of the tensor, unique in this worker
    - datatype, shape: of the tensor; nbytes: in the binary tensor format of KServe
    - host, pid, fd, inode: the file, for processes of the same host
    - address: where other hosts read it; "" if only workers of the same host can join
    """

    worker: str
    number: int
    datatype: str
    shape: tuple[int, ...]
    nbytes: int
    host: str
    pid: int
    fd: int
    inode: int
    address: str


class Held:
    """A kept tensor that the server needs. `release` is called, in any thread, when no array refers to it."""

    def __init__(self, ref: TensorRef, release: Callable[[TensorRef], None]) -> None:
        self.ref = ref
        weakref.finalize(self, release, ref).atexit = False


class RemoteArray(np.ndarray[Any, Any]):
    """An array of a tensor that a worker keeps. It can be reshaped.

    Without elements of its own it has the shape and dtype of the tensor, and zeros in place of the elements.
    """

    held: Held | None = None
    has_elements = True

    @classmethod
    def of(cls, held: Held, elements: npt.NDArray[Any] | None = None) -> RemoteArray:
        """Create an array. `elements`: those of the tensor, if they are in this process too."""
        if elements is None:
            elements = np.broadcast_to(
                Tensor.zeros("", DataType(held.ref.datatype), ()).array, held.ref.shape
            )
            array = elements.view(cls)
            array.has_elements = False
        else:
            array = elements.view(cls)
        array.held = held
        return array

    def __array_finalize__(self, source: Any) -> None:
        # A view of some of the elements is not what the reference names.
        if isinstance(source, RemoteArray) and source.size == self.size:
            self.held = source.held
        if isinstance(source, RemoteArray):
            self.has_elements = source.has_elements


def remote_ref(tensor: Tensor) -> TensorRef | None:
    """Return where the elements of a tensor are, with its present shape; None if they are in this process."""
    array = tensor.array
    if not isinstance(array, RemoteArray) or array.held is None:
        return None
    return msgspec.structs.replace(array.held.ref, shape=array.shape)


@dataclass(slots=True)
class _Kept:
    fd: int
    nbytes: int


class TensorStore:
    """The outputs that a worker keeps until they are released. `address`: see `TensorRef`."""

    def __init__(self, worker: str, address: str = "") -> None:
        self._worker, self._address = worker, address
        self._kept: dict[int, _Kept] = {}
        self._num = 0
        self._host = host_id()

    @property
    def num_bytes(self) -> int:
        """Bytes of all kept tensors."""
        return sum(kept.nbytes for kept in self._kept.values())

    def keep(self, tensor: Tensor) -> TensorRef | None:
        """Copy a tensor to memory that other processes can map. Returns None if there is no memory for it."""
        data = _as_bytes(tensor)
        fd = os.memfd_create("neso-tensor", os.MFD_CLOEXEC)
        try:
            os.posix_fallocate(fd, 0, len(data))  # fails now if memory is short, not when it is written
            with mmap.mmap(fd, len(data)) as memory:
                memory[:] = data
        except OSError:
            os.close(fd)
            return None
        self._num += 1
        self._kept[self._num] = _Kept(fd, len(data))
        return TensorRef(
            worker=self._worker,
            number=self._num,
            datatype=tensor.datatype.value,
            shape=tensor.shape,
            nbytes=len(data),
            host=self._host,
            pid=os.getpid(),
            fd=fd,
            inode=os.fstat(fd).st_ino,
            address=self._address,
        )

    def content(self, number: int) -> mmap.mmap | None:
        """Return the bytes of a kept tensor; None if it was released."""
        kept = self._kept.get(number)
        return None if kept is None else mmap.mmap(kept.fd, kept.nbytes, prot=mmap.PROT_READ)

    def release(self, number: int) -> None:
        """Free a tensor. Processes that have mapped it keep their mapping."""
        kept = self._kept.pop(number, None)
        if kept is not None:
            os.close(kept.fd)

    def release_all(self) -> None:
        """Free all tensors."""
        for number in tuple(self._kept):
            self.release(number)


def _as_bytes(tensor: Tensor) -> memoryview | bytes:
    if tensor.datatype is DataType.BYTES:
        return tensor.to_wire()
    return np.ascontiguousarray(tensor.array).reshape(-1).view(np.uint8).data


def map_tensor(name: str, ref: TensorRef) -> Tensor | None:
    """Map a kept tensor of a process of this host; None if that is not possible. Changes are not seen by others."""
    if ref.host != host_id():
        return None
    try:
        fd = os.open(f"/proc/{ref.pid}/fd/{ref.fd}", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        status = os.fstat(fd)
        if status.st_ino != ref.inode or status.st_size != ref.nbytes:
            return None
        memory = mmap.mmap(fd, ref.nbytes, access=mmap.ACCESS_COPY)
    finally:
        os.close(fd)
    return _from_bytes(name, ref, memoryview(memory))


def _from_bytes(name: str, ref: TensorRef, data: memoryview) -> Tensor:
    return Tensor.from_wire(name, DataType(ref.datatype), ref.shape, data)


class TensorServer:
    """Sends kept tensors to workers of other hosts, which must know the token. Listens at a free port of `host`."""

    def __init__(self, token: str, host: str = "*") -> None:
        self.store: TensorStore | None = None
        self._socket = zmq.asyncio.Context.instance().socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        curve_server(self._socket, token)
        port = self._socket.bind_to_random_port("tcp://*")
        self.address = f"tcp://{host}:{port}"

    async def run(self) -> None:
        """Answer until cancelled."""
        while True:
            reader, *parts = await self._socket.recv_multipart()
            number = int.from_bytes(parts[-1], "little") if parts else 0
            content = self.store.content(number) if self.store is not None else None
            frames: list[Any] = [reader, b"" if content is None else b"found"]
            if content is not None:
                frames.append(content)
            with contextlib.suppress(zmq.ZMQError):  # the reader has gone
                await self._socket.send_multipart(frames, copy=False)

    def close(self) -> None:
        self._socket.close()


class TensorReader:
    """Reads tensors that other workers keep.

    - token: None if all workers are on this host
    - server: name of the server's host, which is that of workers whose address has no host
    - timeout: seconds after which a worker that does not send a tensor is given up
    """

    def __init__(self, token: str | None = None, server: str = "", timeout: float = 30.0) -> None:
        self._token, self._server, self.timeout = token, server, timeout

    async def read(self, name: str, ref: TensorRef) -> Tensor:
        """Return a tensor. Raises `LostTensor`."""
        tensor = map_tensor(name, ref)
        if tensor is not None:
            return tensor
        if not ref.address or self._token is None:
            raise LostTensor(f"input '{name}' is lost: worker '{ref.worker}' has ended")
        return _from_bytes(name, ref, await self._fetch(name, ref))

    async def _fetch(self, name: str, ref: TensorRef) -> memoryview:
        assert self._token is not None
        socket = zmq.asyncio.Context.instance().socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        curve_client(socket, self._token)
        try:
            socket.connect(ref.address.replace(ANY_HOST, f"tcp://{self._server}:"))
            await socket.send(ref.number.to_bytes(8, "little"))
            _, *content = await asyncio.wait_for(socket.recv_multipart(copy=False), self.timeout)
        except (asyncio.TimeoutError, zmq.ZMQError) as error:
            raise LostTensor(f"input '{name}' cannot be read from worker '{ref.worker}': {error}") from None
        finally:
            socket.close()
        if not content or len(content[0].buffer) != ref.nbytes:
            raise LostTensor(f"input '{name}' is lost: worker '{ref.worker}' no longer has it")
        return memoryview(content[0].buffer)

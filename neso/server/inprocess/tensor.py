"""Tensors of the in-process API: host arrays, GPU memory (through torch) and DLPack."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from types import ModuleType
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from neso.server.errors import InvalidArgument, Unsupported
from neso.server.inprocess import dlpack
from neso.server.inprocess.dlpack import DLDeviceType
from neso.server.tensor import DataType
from neso.server.tensor import Tensor as ServerTensor


class MemoryType(IntEnum):
    """Memory types, numbered as in Triton."""

    CPU = 0
    CPU_PINNED = 1
    GPU = 2


Device = str | MemoryType | tuple[MemoryType, int] | tuple[DLDeviceType, int]
"""`"cpu"`, `"gpu"`, `"gpu:1"`, `MemoryType.GPU`, `(MemoryType.GPU, 1)` or `(DLDeviceType.kDLCUDA, 1)`."""

_OF_DLPACK = {
    DLDeviceType.kDLCPU: MemoryType.CPU,
    DLDeviceType.kDLCUDA: MemoryType.GPU,
    DLDeviceType.kDLCUDAHost: MemoryType.CPU_PINNED,
}


def memory_type(device_type: int) -> MemoryType:
    """Return the memory type of a DLPack device type. Raises `InvalidArgument` for unsupported devices."""
    found = _OF_DLPACK.get(device_type)  # type: ignore[call-overload]
    if found is None:
        raise InvalidArgument(f"DLPack device type {int(device_type)} is not supported")
    return found  # type: ignore[no-any-return]


def parse_device(device: Device) -> tuple[MemoryType, int]:
    """Parse a device into memory type and device number. Raises `InvalidArgument`."""
    kind: Any = device
    index: Any = 0
    if isinstance(device, str):
        kind, _, number = device.partition(":")
        kind = MemoryType.__members__.get(kind.upper())
        index = int(number) if number.isascii() and number.isdigit() else None if number else 0
    elif isinstance(device, tuple) and len(device) == 2:
        kind, index = device
    if isinstance(kind, DLDeviceType):
        kind = memory_type(kind)
    if not isinstance(kind, MemoryType) or not isinstance(index, int):
        raise InvalidArgument(
            f"invalid memory type {device!r}, expected cpu, cpu_pinned or gpu, or gpu:NUMBER for a certain one"
        )
    return kind, index


@dataclass
class MemoryBuffer:
    """Memory of a tensor: `size` bytes at address `data_ptr`, valid while `owner` exists."""

    data_ptr: int
    memory_type: MemoryType
    memory_type_id: int
    size: int
    owner: Any

    @classmethod
    def from_dlpack(cls, owner: Any) -> MemoryBuffer:
        """Return the memory of a DLPack object on any device. Raises `InvalidArgument`."""
        found = dlpack.describe(owner)
        if not found.contiguous:
            raise InvalidArgument("only contiguous memory is supported")
        return cls(found.data_ptr, memory_type(found.device_type), found.device_id, found.size, owner)


def wrap_gpu(owner: Any) -> Any:
    """Return a `torch.Tensor` that shares the memory of a DLPack object. Raises `ServerError`."""
    torch = _torch()
    try:
        return torch.from_dlpack(owner).contiguous()
    except (RuntimeError, BufferError, TypeError, AssertionError) as error:
        # torch without CUDA raises AssertionError.
        raise InvalidArgument(f"the object cannot be read through DLPack: {error}") from None


def upload_to_gpu(array: npt.NDArray[Any], index: int) -> Any:
    """Copy an array to a GPU. Raises `Unsupported` if the GPU does not exist."""
    torch = _torch()
    if not torch.cuda.is_available() or index >= torch.cuda.device_count():
        raise Unsupported(f"cannot move the tensor to GPU {index}: there is no such GPU")
    # torch requires writable arrays, but does not write.
    source = array.view(np.uint16) if array.dtype == dlpack.BFLOAT16 else array
    with torch.cuda.device(index):
        moved = torch.from_numpy(source if source.flags.writeable else source.copy()).cuda()
    return moved.view(torch.bfloat16) if array.dtype == dlpack.BFLOAT16 else moved


def download_from_gpu(tensor: Any) -> npt.NDArray[Any]:
    """Copy a tensor to the host."""
    return dlpack.to_numpy(tensor.detach().cpu())


def gpu_datatype(tensor: Any) -> DataType:
    """Return the KServe datatype of a tensor. Raises `InvalidArgument`."""
    return DataType.of_numpy(dlpack.to_numpy(_torch().empty(0, dtype=tensor.dtype)).dtype)


def _torch() -> ModuleType:
    try:
        import torch
    except ImportError:
        raise Unsupported("tensors on a GPU need torch: pip install 'neso-server[torch]'") from None
    return torch


AnyTensor = TypeVar("AnyTensor", bound="Tensor")


class Tensor:
    """An input or output. `numpy.asarray(tensor)` and DLPack (`torch.from_dlpack(tensor)`) share its memory.

    Host tensors are numpy arrays, with `bytes` elements for BYTES; GPU tensors are `torch.Tensor`s. Inputs get their
    name from the request.
    """

    __slots__ = ("_gpu", "_host", "_wire")

    def __init__(self, tensor: ServerTensor) -> None:
        self._host: ServerTensor | None = tensor
        self._gpu: Any = None
        self._wire: npt.NDArray[np.uint8] | None = None

    @classmethod
    def from_object(cls: type[AnyTensor], value: Any, datatype: DataType | None = None) -> AnyTensor:
        """Create from an array, a DLPack object, a list or a scalar; lists and scalars become `datatype` if given.

        Shares memory if possible. Raises `InvalidArgument`.
        """
        if not isinstance(value, Tensor | np.ndarray) and hasattr(value, "__dlpack__"):
            return cls.from_dlpack(value)
        return cls._wrap(make_input("", value, datatype))

    @classmethod
    def from_dlpack(cls: type[AnyTensor], owner: Any) -> AnyTensor:
        """Create from a DLPack object on the host or a GPU, sharing its memory. Raises `ServerError`."""
        if not hasattr(owner, "__dlpack__"):
            raise InvalidArgument(f"{type(owner).__name__} has no __dlpack__")
        if dlpack.is_on_host(owner):
            return cls._wrap(ServerTensor.from_numpy("", dlpack.to_numpy(owner)))
        return cls._on_gpu(wrap_gpu(owner))

    @classmethod
    def from_string_array(cls: type[AnyTensor], strings: Any) -> AnyTensor:
        """Create a BYTES tensor from strings: a list, nested lists or an array. Raises `InvalidArgument`."""
        return cls.from_bytes_array(strings)

    @classmethod
    def from_bytes_array(cls: type[AnyTensor], elements: Any) -> AnyTensor:
        """Create a BYTES tensor from strings or bytes: a list, nested lists or an array. Raises `InvalidArgument`."""
        try:
            array = np.asarray(elements)
            if array.dtype.kind in "SU":
                array = np.array(elements, np.object_)  # fixed-width dtypes strip trailing zeros
        except ValueError as error:
            raise InvalidArgument(f"the elements cannot be made into a tensor: {error}") from None
        if array.dtype.kind != "O" and array.size:
            raise InvalidArgument(f"cannot make a BYTES tensor of {array.dtype} elements")
        return cls._wrap(ServerTensor.from_numpy("", array.astype(np.object_, copy=False)))

    @property
    def name(self) -> str:
        """Name of an output; "" otherwise."""
        return "" if self._host is None else self._host.name

    @property
    def datatype(self) -> DataType:
        return gpu_datatype(self._gpu) if self._host is None else self._host.datatype

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self._gpu.shape) if self._host is None else self._host.shape

    @property
    def memory_type(self) -> MemoryType:
        return MemoryType.CPU if self._host is not None else memory_type(self._gpu.__dlpack_device__()[0])

    @property
    def memory_type_id(self) -> int:
        """The number of the GPU, 0 on the host."""
        return 0 if self._host is not None else int(self._gpu.__dlpack_device__()[1])

    @property
    def data_ptr(self) -> int:
        """Address of the first element, valid while the tensor exists. For BYTES see `memory_buffer`."""
        return self.memory_buffer.data_ptr

    @property
    def size(self) -> int:
        """Size in bytes; for BYTES in the binary tensor format."""
        return self.memory_buffer.size if self._host is None else self._host.byte_size

    @property
    def memory_buffer(self) -> MemoryBuffer:
        """The memory of the tensor; for BYTES a cached copy in the binary tensor format."""
        if self._host is None:
            return MemoryBuffer.from_dlpack(self._gpu)
        array = self._host.array
        if self._host.datatype is DataType.BYTES:
            if self._wire is None:
                self._wire = np.frombuffer(self._host.to_wire(), np.uint8)
            array = self._wire
        return MemoryBuffer(array.ctypes.data, MemoryType.CPU, 0, array.nbytes, array)

    def numpy(self) -> npt.NDArray[Any]:
        """Return the elements; a copy for GPU tensors."""
        return self.to_server().array

    def to_string_array(self) -> npt.NDArray[np.object_]:
        """Return the elements of a BYTES tensor as strings. Raises `InvalidArgument` for other tensors."""
        self._need_bytes()
        texts = np.empty(self.shape, np.object_)
        texts.reshape(-1)[:] = self.to_server().strings()
        return texts

    def to_bytes_array(self) -> npt.NDArray[np.object_]:
        """Return the elements of a BYTES tensor. Raises `InvalidArgument` for other tensors."""
        self._need_bytes()
        return self.to_server().array

    def to_host(self: AnyTensor) -> AnyTensor:
        """Return this tensor if it is on the host, otherwise a copy on the host."""
        return self.to_device(MemoryType.CPU)

    def to_device(self: AnyTensor, device: Device) -> AnyTensor:
        """Return this tensor if it is on the device, otherwise a copy there.

        Raises `InvalidArgument`, `Unsupported` if the GPU does not exist.

        BYTES tensors stay on the host.
        """
        kind, index = parse_device(device)
        if kind is not MemoryType.GPU:
            return self if self._host is not None else self._wrap(self.to_server())
        if self.memory_type is MemoryType.GPU and self.memory_type_id == index:
            return self
        if self.datatype is DataType.BYTES:
            return self
        return self._on_gpu(upload_to_gpu(self.numpy(), index))

    def to_server(self) -> ServerTensor:
        """Convert to a tensor of the core, on the host."""
        if self._host is not None:
            return self._host
        return ServerTensor("", self.datatype, download_from_gpu(self._gpu))

    @classmethod
    def _wrap(cls: type[AnyTensor], tensor: ServerTensor) -> AnyTensor:
        """Wrap a core tensor. Also works for subclasses with other constructors."""
        made = cls.__new__(cls)
        made._host, made._gpu, made._wire = tensor, None, None
        return made

    @classmethod
    def _on_gpu(cls: type[AnyTensor], tensor: Any) -> AnyTensor:
        made = cls.__new__(cls)
        made._host, made._gpu, made._wire = None, tensor, None
        return made

    def _need_bytes(self) -> None:
        if self.datatype is not DataType.BYTES:
            raise InvalidArgument(f"tensor '{self.name}' is {self.datatype.value}, not BYTES")

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> npt.NDArray[Any]:
        return np.array(self.numpy(), dtype=dtype, copy=copy)

    def __dlpack__(self, **options: Any) -> Any:
        if self._host is None:
            return self._gpu.__dlpack__(**options)
        if self._host.datatype is DataType.BYTES:
            raise InvalidArgument("DLPack has no BYTES tensors, use to_bytes_array() or to_string_array()")
        return dlpack.export(self._host.array, self, **options)

    def __dlpack_device__(self) -> tuple[Any, Any]:
        owner = self._gpu if self._host is None else self._host.array
        device: tuple[Any, Any] = owner.__dlpack_device__()
        return device

    def __repr__(self) -> str:
        return f"Tensor({self.name!r}, {self.datatype.value}, {self.numpy()!r})"


def make_input(name: str, value: Any, datatype: DataType | None) -> ServerTensor:
    """Create an input tensor from an array, a DLPack object, a list or a scalar; GPU memory is copied to the host.

    Lists and scalars become the model's `datatype`; arrays keep theirs. Raises `ServerError`.
    """
    if isinstance(value, np.ndarray | np.generic):
        return ServerTensor.from_numpy(name, value)
    if isinstance(value, Tensor):
        value = value.to_server()
    if isinstance(value, ServerTensor):
        return ServerTensor(name, value.datatype, value.array)
    if hasattr(value, "__dlpack__"):
        if not dlpack.is_on_host(value):
            return ServerTensor.from_numpy(name, download_from_gpu(wrap_gpu(value)))
        return ServerTensor.from_numpy(name, dlpack.to_numpy(value, f"input '{name}'"))
    return _from_plain(name, value, datatype)


def _from_plain(name: str, value: Any, datatype: DataType | None) -> ServerTensor:
    if isinstance(value, str | bytes):
        value = np.array(value, np.object_)
    try:
        if datatype is DataType.BYTES:
            return ServerTensor.from_numpy(name, np.array(value, np.object_))
        natural = np.asarray(value)
        if datatype is None or natural.dtype.kind in "SUO":
            return ServerTensor.from_numpy(name, natural)
        if natural.size and not _fits(natural.dtype, datatype.dtype):
            raise InvalidArgument(
                f"input '{name}' is {datatype.value}, a list of {natural.dtype} does not convert to that"
            )
        return ServerTensor(name, datatype, np.asarray(value, datatype.dtype))
    except (ValueError, TypeError, OverflowError) as error:
        raise InvalidArgument(f"input '{name}' cannot be made into a tensor: {error}") from None


def _fits(source: np.dtype[Any], target: np.dtype[Any]) -> bool:
    if source.kind in "iu":
        return target.kind != "b"
    if source.kind == "f":
        return target.kind in "fV"  # ml_dtypes' bfloat16 has kind V
    return source == target

"""Tensors as a Python program likes them, and what it may give in their place."""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from neso.server.datatypes import DataType
from neso.server.errors import InvalidArgument
from neso.server.inprocess import dlpack, gpu
from neso.server.inprocess.memory import Device, MemoryBuffer, MemoryType, memory_type, parse_device
from neso.server.tensor import Tensor as ServerTensor

AnyTensor = TypeVar("AnyTensor", bound="Tensor")


class Tensor:
    """An input or an output. `numpy.asarray(tensor)` and DLPack (`torch.from_dlpack(tensor)`) share its memory.

    On the host it is a numpy array; elements of BYTES tensors are `bytes` objects. In the memory of a GPU it is a
    `torch.Tensor`. Inputs need no name, they get that under which they are sent.
    """

    __slots__ = ("_gpu", "_host", "_wire")

    def __init__(self, tensor: ServerTensor) -> None:
        self._host: ServerTensor | None = tensor
        self._gpu: Any = None
        self._wire: npt.NDArray[np.uint8] | None = None

    @classmethod
    def from_object(cls: type[AnyTensor], value: Any, datatype: DataType | None = None) -> AnyTensor:
        """From an array, an object with DLPack, a list or a scalar; the last two become `datatype` if it is given.

        Shares memory where it can. Raises `InvalidArgument`.
        """
        if not isinstance(value, Tensor | np.ndarray) and hasattr(value, "__dlpack__"):
            return cls.from_dlpack(value)
        return cls._wrap(make_input("", value, datatype))

    @classmethod
    def from_dlpack(cls: type[AnyTensor], owner: Any) -> AnyTensor:
        """From an object with DLPack, in whose memory it stays, on the host or on a GPU. Raises `ServerError`."""
        if not hasattr(owner, "__dlpack__"):
            raise InvalidArgument(f"{type(owner).__name__} has no __dlpack__")
        if dlpack.is_on_host(owner):
            return cls._wrap(ServerTensor.from_numpy("", dlpack.to_numpy(owner)))
        return cls._on_gpu(gpu.wrap(owner))

    @classmethod
    def from_string_array(cls: type[AnyTensor], strings: Any) -> AnyTensor:
        """A BYTES tensor from text: a list, nested lists or an array. Raises `InvalidArgument`."""
        return cls.from_bytes_array(strings)

    @classmethod
    def from_bytes_array(cls: type[AnyTensor], elements: Any) -> AnyTensor:
        """A BYTES tensor from text or bytes: a list, nested lists or an array. Raises `InvalidArgument`."""
        try:
            array = np.asarray(elements)
            if array.dtype.kind in "SU":
                array = np.array(elements, np.object_)  # fixed widths would strip trailing zeros
        except ValueError as error:
            raise InvalidArgument(f"the elements cannot be made into a tensor: {error}") from None
        if array.dtype.kind != "O" and array.size:
            raise InvalidArgument(f"cannot make a BYTES tensor of {array.dtype} elements")
        return cls._wrap(ServerTensor.from_numpy("", array.astype(np.object_, copy=False)))

    @property
    def name(self) -> str:
        """Of an output; "" otherwise."""
        return "" if self._host is None else self._host.name

    @property
    def datatype(self) -> DataType:
        return gpu.datatype(self._gpu) if self._host is None else self._host.datatype

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
        """The address of the first element, valid while the tensor lives. For BYTES see `memory_buffer`."""
        return self.memory_buffer.data_ptr

    @property
    def size(self) -> int:
        """Bytes; those of the binary tensor format for BYTES."""
        return self.memory_buffer.size if self._host is None else self._host.byte_size

    @property
    def memory_buffer(self) -> MemoryBuffer:
        """The memory. For BYTES a copy in the binary tensor format, which the tensor keeps."""
        if self._host is None:
            return MemoryBuffer.from_dlpack(self._gpu)
        array = self._host.array
        if self._host.datatype is DataType.BYTES:
            if self._wire is None:
                self._wire = np.frombuffer(self._host.to_wire(), np.uint8)
            array = self._wire
        return MemoryBuffer(array.ctypes.data, MemoryType.CPU, 0, array.nbytes, array)

    def numpy(self) -> npt.NDArray[Any]:
        """The elements: the tensor's own memory, or a copy of that on a GPU."""
        return self.to_server().array

    def to_string_array(self) -> npt.NDArray[np.object_]:
        """The elements of a BYTES tensor as text. Raises `InvalidArgument` for other tensors."""
        self._need_bytes()
        texts = np.empty(self.shape, np.object_)
        texts.reshape(-1)[:] = self.to_server().strings()
        return texts

    def to_bytes_array(self) -> npt.NDArray[np.object_]:
        """The elements of a BYTES tensor. Raises `InvalidArgument` for other tensors."""
        self._need_bytes()
        return self.to_server().array

    def to_host(self: AnyTensor) -> AnyTensor:
        """The same tensor if it is on the host, else a copy there."""
        return self.to_device(MemoryType.CPU)

    def to_device(self: AnyTensor, device: Device) -> AnyTensor:
        """The same tensor if it is there, else a copy. Raises `InvalidArgument`, `Unsupported` without such a GPU.

        BYTES tensors stay on the host: their elements are Python objects.
        """
        kind, index = parse_device(device)
        if kind is not MemoryType.GPU:
            return self if self._host is not None else self._wrap(self.to_server())
        if self.memory_type is MemoryType.GPU and self.memory_type_id == index:
            return self
        if self.datatype is DataType.BYTES:
            return self
        return self._on_gpu(gpu.upload(self.numpy(), index))

    def to_server(self) -> ServerTensor:
        """The tensor as the core knows it, on the host."""
        if self._host is not None:
            return self._host
        return ServerTensor("", self.datatype, gpu.download(self._gpu))

    @classmethod
    def _wrap(cls: type[AnyTensor], tensor: ServerTensor) -> AnyTensor:
        """For subclasses too, whose constructors take other things."""
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
        return dlpack.export(self._host.array, **options)

    def __dlpack_device__(self) -> tuple[Any, Any]:
        owner = self._gpu if self._host is None else self._host.array
        device: tuple[Any, Any] = owner.__dlpack_device__()
        return device

    def __repr__(self) -> str:
        return f"Tensor({self.name!r}, {self.datatype.value}, {self.numpy()!r})"


def make_input(name: str, value: Any, datatype: DataType | None) -> ServerTensor:
    """A tensor from an array, a DLPack object, a list or a scalar; what lies on a GPU is copied to the host.

    Lists and scalars become the model's `datatype`, arrays keep theirs. Raises `ServerError`.
    """
    if isinstance(value, np.ndarray | np.generic):
        return ServerTensor.from_numpy(name, value)
    if isinstance(value, Tensor):
        value = value.to_server()
    if isinstance(value, ServerTensor):
        return ServerTensor(name, value.datatype, value.array)
    if hasattr(value, "__dlpack__"):
        if not dlpack.is_on_host(value):
            return ServerTensor.from_numpy(name, gpu.download(gpu.wrap(value)))
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


def _fits(given: np.dtype[Any], wanted: np.dtype[Any]) -> bool:
    if given.kind in "iu":
        return wanted.kind != "b"
    if given.kind == "f":
        return wanted.kind in "fV"  # ml_dtypes' bfloat16 is of kind V
    return given == wanted

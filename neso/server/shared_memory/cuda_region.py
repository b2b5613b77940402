"""Memory that a client has on a GPU, mapped into this process."""

from __future__ import annotations

import logging
import weakref
from dataclasses import dataclass

from neso.server.errors import InternalError, InvalidArgument
from neso.server.shared_memory.cuda_driver import HANDLE_SIZE, CudaDriver, CudaError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class CudaRegion:
    """`byte_size` bytes of a GPU's memory, copied to and from the host.

    Mapped for as long as this object lives, whether it is still registered or not.
    """

    name: str
    device_id: int
    byte_size: int
    _driver: CudaDriver
    _address: int

    @classmethod
    def open(cls, name: str, driver: CudaDriver, handle: bytes, device_id: int, byte_size: int) -> CudaRegion:
        """Map it. Raises `InvalidArgument` for what is no such memory, or not as large."""
        if len(handle) != HANDLE_SIZE or not 0 <= device_id < driver.device_count or byte_size <= 0:
            raise _refused(name, "invalid args")
        try:
            address = driver.open(device_id, handle)
        except CudaError as error:
            raise _refused(name, str(error)) from None
        region = cls(name, device_id, byte_size, driver, address)
        weakref.finalize(region, _close, driver, device_id, address)
        try:
            if byte_size > driver.size(device_id, address):
                raise _refused(name, "invalid args")
        except CudaError as error:
            raise _refused(name, str(error)) from None
        return region

    def check(self, offset: int, byte_size: int) -> None:
        """Raises `InvalidArgument` for a part that is out of range."""
        if offset >= self.byte_size:
            raise InvalidArgument(f"Invalid offset for shared memory region: '{self.name}'")
        if offset + byte_size > self.byte_size:
            raise InvalidArgument(f"Invalid offset + byte size for shared memory region: '{self.name}'")

    def read(self, offset: int, byte_size: int) -> memoryview:
        """A copy of the bytes from `offset` of the region. Raises `InvalidArgument`, `InternalError`."""
        self.check(offset, byte_size)
        try:
            data = self._driver.copy_to_host(self.device_id, self._address + offset, byte_size)
        except CudaError as error:
            raise InternalError(f"failed to read CUDA shared memory region '{self.name}': {error}") from None
        return memoryview(data).toreadonly()

    def write(self, offset: int, data: bytes | memoryview) -> None:
        """Put bytes at `offset` of the region. Raises `InvalidArgument`, `InternalError`."""
        self.check(offset, len(data))
        try:
            self._driver.copy_to_device(self.device_id, self._address + offset, bytes(data))
        except CudaError as error:
            raise InternalError(f"failed to write CUDA shared memory region '{self.name}': {error}") from None


def _close(driver: CudaDriver, device_id: int, address: int) -> None:
    try:
        driver.close(device_id, address)
    except CudaError as error:
        logger.warning("failed to close CUDA shared memory: %s", error)


def _refused(name: str, why: str) -> InvalidArgument:
    return InvalidArgument(f"failed to register CUDA shared memory region: '{name}', {why}")

"""The shared memory regions that clients have registered."""

from __future__ import annotations

from functools import cached_property

from neso.server.errors import AlreadyExists, InvalidArgument, NotFound, Unsupported
from neso.server.shared_memory.cuda_driver import CudaDriver
from neso.server.shared_memory.cuda_region import CudaRegion
from neso.server.shared_memory.region import SharedMemoryRegion
from neso.server.shared_memory.window import SharedMemoryWindow


class SharedMemory:
    """Knows the regions by name: those of the system and, where there is a GPU, those of CUDA.

    What clients ask for is refused with `Unsupported` unless `enabled`: who may register regions can read and write any
    shared memory that the server's user can.
    """

    def __init__(self, enabled: bool) -> None:
        self.enabled = enabled
        self._regions: dict[str, SharedMemoryRegion] = {}
        self._cuda_regions: dict[str, CudaRegion] = {}

    def check_enabled(self) -> None:
        """Raises `Unsupported` if clients may not use shared memory."""
        if not self.enabled:
            raise Unsupported(
                "client shared memory is disabled; start the server with --allow-client-shm=true"
            )

    def close(self) -> None:
        """Forget all regions, at the end of the server."""
        self._regions.clear()
        self._cuda_regions.clear()

    @cached_property
    def cuda(self) -> CudaDriver | None:
        """None where there is no GPU, or clients may not use it."""
        return CudaDriver.load() if self.enabled else None

    def status(self, name: str = "") -> list[SharedMemoryRegion]:
        """The region of that name, or all. Raises `NotFound`."""
        self.check_enabled()
        if not name:
            return list(self._regions.values())
        if name not in self._regions:
            raise NotFound(f"Unable to find system shared memory region: '{name}'")
        return [self._regions[name]]

    def register(self, name: str, key: str, offset: int, byte_size: int) -> None:
        """Map `byte_size` bytes from `offset` of the object `key` of shm_open. Raises `ServerError`."""
        self.check_enabled()
        self._check_free(name)
        self._regions[name] = SharedMemoryRegion.open(name, key, offset, byte_size)

    def unregister(self, name: str = "") -> None:
        """Forget the region of that name, if there is one, or all. Requests in flight keep it mapped."""
        self.check_enabled()
        if name:
            self._regions.pop(name, None)
        else:
            self._regions.clear()

    def window(self, name: str, offset: int, byte_size: int) -> SharedMemoryWindow:
        """A part of a region. Raises `NotFound`, `InvalidArgument` if it is out of range."""
        self.check_enabled()
        region = self._regions.get(name) or self._cuda_regions.get(name)
        if region is None:
            raise NotFound(f"Unable to find shared memory region: '{name}'")
        region.check(offset, byte_size)
        return SharedMemoryWindow(region, offset, byte_size)

    def cuda_status(self, name: str = "") -> list[CudaRegion]:
        """The region of that name, or all. Raises `NotFound`."""
        self.check_enabled()
        if not name:
            return list(self._cuda_regions.values())
        if name not in self._cuda_regions:
            raise NotFound(f"Unable to find cuda shared memory region: '{name}'")
        return [self._cuda_regions[name]]

    def register_cuda(self, name: str, handle: bytes, device_id: int, byte_size: int) -> None:
        """Map memory of a GPU by its handle from another process. Raises `ServerError`."""
        self.check_enabled()
        if self.cuda is None:
            raise InvalidArgument(
                f"failed to register CUDA shared memory region: '{name}', GPUs not supported"
            )
        self._check_free(name)
        self._cuda_regions[name] = CudaRegion.open(name, self.cuda, handle, device_id, byte_size)

    def unregister_cuda(self, name: str = "") -> None:
        """Forget the region of that name, if there is one, or all. Requests in flight keep it mapped."""
        self.check_enabled()
        if name:
            self._cuda_regions.pop(name, None)
        else:
            self._cuda_regions.clear()

    def _check_free(self, name: str) -> None:
        if name in self._regions or name in self._cuda_regions:
            raise AlreadyExists(f"shared memory region '{name}' already in manager")

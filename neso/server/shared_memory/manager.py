"""The system shared memory regions that clients have registered."""

from __future__ import annotations

from neso.server.errors import AlreadyExists, NotFound, Unsupported
from neso.server.shared_memory.region import SharedMemoryRegion
from neso.server.shared_memory.window import SharedMemoryWindow


class SharedMemory:
    """Knows the regions by name. CUDA's are answered for too: there are none, and none can be registered.

    What clients ask for is refused with `Unsupported` unless `enabled`: who may register regions can read and write any
    shared memory that the server's user can.
    """

    def __init__(self, enabled: bool) -> None:
        self.enabled = enabled
        self._regions: dict[str, SharedMemoryRegion] = {}

    def check_enabled(self) -> None:
        """Raises `Unsupported` if clients may not use shared memory."""
        if not self.enabled:
            raise Unsupported(
                "client shared memory is disabled; start the server with --allow-client-shm=true"
            )

    def close(self) -> None:
        """Forget all regions, at the end of the server."""
        self._regions.clear()

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
        if name in self._regions:
            raise AlreadyExists(f"shared memory region '{name}' already in manager")
        self._regions[name] = SharedMemoryRegion.open(name, key, offset, byte_size)

    def unregister(self, name: str = "") -> None:
        """Forget the region of that name, if there is one, or all. Requests in flight keep it mapped."""
        self.check_enabled()
        if name:
            self._regions.pop(name, None)
        else:
            self.close()

    def window(self, name: str, offset: int, byte_size: int) -> SharedMemoryWindow:
        """A part of a region. Raises `NotFound`, `InvalidArgument` if it is out of range."""
        self.check_enabled()
        region = self._regions.get(name)
        if region is None:
            raise NotFound(f"Unable to find shared memory region: '{name}'")
        region.view(offset, byte_size)
        return SharedMemoryWindow(region, offset, byte_size)

    def cuda_status(self, name: str = "") -> None:
        """No regions. Raises `NotFound` if one is named."""
        self.check_enabled()
        if name:
            raise NotFound(f"Unable to find cuda shared memory region: '{name}'")

    def register_cuda(self, name: str) -> None:
        """Raises `Unsupported`."""
        self.check_enabled()
        raise Unsupported(
            f"failed to register CUDA shared memory region '{name}': CUDA shared memory is not supported"
        )

    def unregister_cuda(self) -> None:
        """There is nothing to forget."""
        self.check_enabled()

"""Where a model would like the outputs of another model to be. Here, tensors are in the memory of the CPU."""

from __future__ import annotations

from enum import IntEnum


class MemoryType(IntEnum):
    """Kinds of memory."""

    TRITONSERVER_MEMORY_CPU = 0
    TRITONSERVER_MEMORY_GPU = 1


TRITONSERVER_MEMORY_CPU = MemoryType.TRITONSERVER_MEMORY_CPU
TRITONSERVER_MEMORY_GPU = MemoryType.TRITONSERVER_MEMORY_GPU


class PreferredMemory:
    """A wish for `InferenceRequest(preferred_memory=…)`, which the server may not be able to fulfil."""

    def __init__(
        self, preferred_memory_type: MemoryType = TRITONSERVER_MEMORY_CPU, preferred_device_id: int = 0
    ) -> None:
        self._type = MemoryType(preferred_memory_type)
        self._device_id = preferred_device_id

    def preferred_memory_type(self) -> MemoryType:
        return self._type

    def preferred_device_id(self) -> int:
        return self._device_id

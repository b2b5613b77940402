"""The methods of the shared memory extensions."""

from __future__ import annotations

from typing import Any

from grpc.aio import ServicerContext as Context
from tritonclient.grpc import service_pb2

from neso.frontends.kserve_grpc.calls import Calls, rpc
from neso.server.core import Core


class SharedMemoryMethods:
    """Part of the servicer."""

    core: Core
    calls: Calls

    @rpc
    async def SystemSharedMemoryStatus(self, request: Any, context: Context) -> Any:
        reply = service_pb2.SystemSharedMemoryStatusResponse()
        for region in self.core.shared_memory.status(request.name):
            status = reply.regions[region.name]
            status.name, status.key = region.name, region.key
            status.offset, status.byte_size = region.offset, region.byte_size
        return reply

    @rpc
    async def SystemSharedMemoryRegister(self, request: Any, context: Context) -> Any:
        self.core.shared_memory.register(request.name, request.key, request.offset, request.byte_size)
        return service_pb2.SystemSharedMemoryRegisterResponse()

    @rpc
    async def SystemSharedMemoryUnregister(self, request: Any, context: Context) -> Any:
        self.core.shared_memory.unregister(request.name)
        return service_pb2.SystemSharedMemoryUnregisterResponse()

    @rpc
    async def CudaSharedMemoryStatus(self, request: Any, context: Context) -> Any:
        reply = service_pb2.CudaSharedMemoryStatusResponse()
        for region in self.core.shared_memory.cuda_status(request.name):
            status = reply.regions[region.name]
            status.name, status.device_id, status.byte_size = region.name, region.device_id, region.byte_size
        return reply

    @rpc
    async def CudaSharedMemoryRegister(self, request: Any, context: Context) -> Any:
        self.core.shared_memory.register_cuda(
            request.name, request.raw_handle, request.device_id, request.byte_size
        )
        return service_pb2.CudaSharedMemoryRegisterResponse()

    @rpc
    async def CudaSharedMemoryUnregister(self, request: Any, context: Context) -> Any:
        self.core.shared_memory.unregister_cuda(request.name)
        return service_pb2.CudaSharedMemoryUnregisterResponse()

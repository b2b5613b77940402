"""The backend that executes `model.pt` and `model.pt2`."""

from __future__ import annotations

import threading

import torch

from neso.backends.pytorch.exported import ExportedProgram
from neso.backends.pytorch.model import TorchModel
from neso.backends.pytorch.program import Program
from neso.backends.pytorch.script import ScriptProgram
from neso.backends.tensor import Instance, InstanceKind, Parameters, TensorBackend, TensorModel
from neso.server.backend import ModelContext
from neso.server.errors import InvalidArgument, Unsupported

EXPORTED = ".pt2"


class PyTorchBackend(TensorBackend):
    """A program for each instance, or one for all on the same device with the parameter `ENABLE_WEIGHT_SHARING`."""

    def __init__(self, context: ModelContext) -> None:
        super().__init__(context)
        self._settings = Parameters(context.config, context.backend_config)
        self._shared: dict[torch.device | None, Program] = {}
        self._opening = threading.Lock()

    def make_model(self, instance: Instance) -> TensorModel:
        """Raises `Unsupported` for an instance on a GPU that torch cannot use."""
        device = _device(instance, self.context.name)
        return TorchModel(
            self.context, instance, device or torch.device("cpu"), lambda: self._program(device)
        )

    async def unload(self) -> None:
        await super().unload()
        self._shared.clear()

    def _program(self, device: torch.device | None) -> Program:
        if not self._settings.boolean("ENABLE_WEIGHT_SHARING", False):
            return self._open(device)
        with self._opening:
            if device not in self._shared:
                self._shared[device] = self._open(device)
            return self._shared[device]

    def _open(self, device: torch.device | None) -> Program:
        path = self.context.version_directory / self.context.config.default_model_filename
        if not path.is_file():
            raise InvalidArgument(f"unable to find '{path}' for model '{self.context.name}'")
        program = ExportedProgram if path.suffix == EXPORTED else ScriptProgram
        return program(path, device)


def _device(instance: Instance, model: str) -> torch.device | None:
    """None for kind MODEL: the parts of the program stay where they were when it was saved."""
    if instance.kind is InstanceKind.MODEL:
        return None
    if instance.kind is InstanceKind.CPU:
        return torch.device("cpu")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if instance.device >= count:
        raise Unsupported(
            f"instance '{instance.name}' of model '{model}' is to run on GPU {instance.device}, torch finds {count} "
            "GPUs"
        )
    return torch.device("cuda", instance.device)

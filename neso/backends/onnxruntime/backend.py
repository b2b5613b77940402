"""The backend that executes `model.onnx`."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from neso.backends.onnxruntime import auto_complete
from neso.backends.onnxruntime.model import OnnxModel
from neso.backends.onnxruntime.session import Session, open_session, read_signature
from neso.backends.tensor import Instance, InstanceKind, Parameters, TensorBackend, TensorModel
from neso.server.backend import ModelContext


class OnnxRuntimeBackend(TensorBackend):
    """An inference session for each instance, or one for all that run on the same device.

    The latter with the parameter `share_session_between_instances`: the weights are in memory once.
    """

    heeds = frozenset({"optimization"})

    def __init__(self, context: ModelContext) -> None:
        super().__init__(context)
        self._settings = Parameters(context.config, context.backend_config)
        self._shared: dict[tuple[InstanceKind, int], Session] = {}
        self._opening = threading.Lock()

    @classmethod
    def auto_complete(
        cls, config: Any, directory: Path, version_directory: Path, backend_config: Mapping[str, str]
    ) -> None:
        """Inputs, outputs and `max_batch_size` from the model, unless inputs and outputs are given."""
        if not auto_complete.is_needed(config):
            return
        settings = Parameters(config, backend_config)
        signature = read_signature(model_file(config, version_directory))
        auto_complete.complete(config, signature, settings.integer("default-max-batch-size", 4))

    def make_model(self, instance: Instance) -> TensorModel:
        return OnnxModel(self.context, instance, lambda: self._session(instance))

    async def unload(self) -> None:
        await super().unload()
        self._shared.clear()

    def _session(self, instance: Instance) -> Session:
        if not self._settings.boolean("share_session_between_instances", False):
            return self._open(instance)
        with self._opening:
            place = (instance.kind, instance.device)
            if place not in self._shared:
                self._shared[place] = self._open(instance)
            return self._shared[place]

    def _open(self, instance: Instance) -> Session:
        path = model_file(self.context.config, self.context.version_directory)
        return open_session(path, self.context.config, self._settings, instance)


def model_file(config: Any, version_directory: Path) -> Path:
    """`default_model_filename`; the file of that name in it where that is a folder, beside its external data."""
    name = str(config.default_model_filename)
    path = version_directory / name
    return path / name if path.is_dir() else path

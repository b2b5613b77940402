"""`TensorFlowBackend`: executes models with TensorFlow."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from neso.backends.tensor import Instance, InstanceKind, Parameters, TensorBackend, TensorModel
from neso.backends.tensor.model import Arrays, SharedByDevice, output_names
from neso.backends.tensor.signature import Scalars, complete_config, needs_completion
from neso.backends.tensorflow.model_file import OpenModel, explain, open_model, read_signature
from neso.backends.tensorflow.options import GRAPH_DEF, SAVED_MODEL, check_options, session_share_count
from neso.server.backend import ModelContext
from neso.server.errors import InternalError, InvalidArgument


class TensorFlowBackend(TensorBackend):
    """One session per instance, or per MAX_SESSION_SHARE_COUNT instances."""

    implemented_fields = frozenset({"optimization"})

    def __init__(self, context: ModelContext) -> None:
        super().__init__(context)
        self._settings = Parameters(context.config, context.backend_config)
        self._sessions: SharedByDevice[OpenModel] = SharedByDevice(shared=True)
        self._instances = itertools.count()

    @classmethod
    def auto_complete(
        cls, config: Any, directory: Path, version_directory: Path, backend_config: Mapping[str, str]
    ) -> None:
        """Set the platform; read inputs, outputs and `max_batch_size` of a SavedModel, unless they are configured."""
        path = version_directory / config.default_model_filename
        _complete_platform(config, path)
        settings = Parameters(config, backend_config)
        check_options(config, settings)
        if not needs_completion(config):
            return
        if config.platform == GRAPH_DEF:
            raise InvalidArgument(
                f"model '{config.name}' needs inputs and outputs in its configuration: a GraphDef has no signature"
            )
        signature = read_signature(path, config, settings)
        complete_config(config, signature, settings.integer("default-max-batch-size", 4))

    async def load(self) -> None:
        """Check the settings, then start and load all instances."""
        _complete_platform(self.context.config, self._path)
        check_options(self.context.config, self._settings)
        await super().load()

    def make_model(self, instance: Instance) -> TensorModel:
        if instance.kind is InstanceKind.GPU:
            raise InvalidArgument(
                f"unable to load model '{self.context.name}', the tensorflow backend supports only KIND_CPU"
            )
        number = next(self._instances) // session_share_count(self._settings)
        return TensorFlowModel(self.context, instance, lambda: self._sessions.get(number, self._open))

    async def unload(self) -> None:
        await super().unload()
        self._sessions.clear()

    @property
    def _path(self) -> Path:
        return self.context.version_directory / str(self.context.config.default_model_filename)

    def _open(self) -> OpenModel:
        return open_model(self._path, self.context.directory, self.context.config, self._settings)


def _complete_platform(config: Any, path: Path) -> None:
    if not config.platform:
        config.platform = GRAPH_DEF if path.is_file() else SAVED_MODEL


class TensorFlowModel(TensorModel):
    """An instance. `open` returns its session, which other instances may share."""

    def __init__(self, context: ModelContext, instance: Instance, open: Callable[[], OpenModel]) -> None:
        super().__init__(context, instance)
        self._open = open
        self._model: OpenModel | None = None
        self._scalars: Scalars | None = None
        self._fetches: dict[str, tf.Tensor] = {}

    def load(self) -> None:
        self._model = self._open()
        self._scalars = Scalars(self.context.config, self._model.signature)
        self._fetches = {name: self._model.outputs[name] for name in output_names(self.context.config)}

    def run(self, inputs: Arrays) -> Arrays:
        if self._model is None or self._scalars is None:
            raise InternalError("the model is not loaded")
        feeds = {self._model.inputs[name]: a for name, a in self._scalars.to_model(inputs).items()}
        try:
            found = self._model.session.run(self._fetches, feeds)  # releases the GIL
        except tf.errors.OpError as error:
            raise InternalError(f"tensorflow error: {explain(error)}") from None
        except ValueError as error:  # a dimension that the configuration leaves open, and the model does not
            raise InvalidArgument(f"tensorflow error: {error}") from None
        outputs = {
            name: np.asarray(value, object if self._fetches[name].dtype == tf.string else None)
            for name, value in found.items()
        }
        return self._scalars.from_model(outputs)

    def unload(self) -> None:
        self._model = None

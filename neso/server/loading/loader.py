"""Preparation of a model load: configuration from the source, and warmup."""

from __future__ import annotations

import asyncio
import logging
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from neso.server.backend import Backend, ModelContext, find_backend, python_based_file, stage_backend
from neso.server.config.model_config import (
    check_config,
    complete_batching,
    complete_config,
    ignored_fields,
    is_ensemble,
    read_config,
)
from neso.server.errors import InternalError, InvalidArgument, ServerError
from neso.server.inference_request import InferenceRequest
from neso.server.inference_response import ResponseStream
from neso.server.options import ServerOptions
from neso.server.repository.source import ModelSource, choose_versions, find_versions
from neso.server.repository_agents import RepositoryAgent, run_agents
from neso.server.schedulers.sequence_inputs import ControlInputs, SequenceStates
from neso.server.signature import Signature
from neso.server.tensor import DataType, Tensor, element_count

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ModelPlan:
    """A checked model source, ready to be loaded. `directory` can be a folder prepared by a repository agent."""

    source: ModelSource
    directory: Path
    config: Any
    backend: type[Backend]
    versions: dict[int, Path]
    agents: tuple[RepositoryAgent, ...] = ()

    @property
    def steps(self) -> frozenset[str]:
        """Model names of an ensemble's steps."""
        return frozenset(step.model_name for step in self.config.ensemble_scheduling.step)


def plan_model(source: ModelSource, options: ServerOptions) -> ModelPlan:
    """Read, complete and check the configuration. Blocks (files, imports). Raises `ServerError`."""
    config = _find_config(source, options)
    directory, agents = run_agents(config, source.directory)
    versions = find_versions(directory)
    if not versions and source.config is not None and source.fingerprint is not None:
        versions = [1]  # a checkpoint outside a repository has no version folders
    newest = directory / str(versions[-1] if versions else 1)
    if source.renamed:
        config.name = source.name
    complete_config(config, source.name, newest)
    check_config(config, source.name, complete=options.disable_auto_complete_config)
    chosen = choose_versions(versions, config.version_policy, source.name)
    backend = find_backend("ensemble" if is_ensemble(config) else config.backend, options.backend_directory)
    if source.name in options.stages.workers:
        backend = stage_backend(backend)
    if not options.disable_auto_complete_config:
        settings = backend_settings(config.backend, options)
        backend.auto_complete(config, directory, directory / str(chosen[-1]), settings)
        check_config(config, source.name)
    complete_batching(config)
    for check in options.config_checks:
        check(config)
    if ignored := ignored_fields(config, backend.implemented_fields):
        logger.warning(
            "model '%s': its configuration has fields without effect: %s", source.name, ", ".join(ignored)
        )
    folders = {version: directory / str(version) for version in chosen}
    return ModelPlan(source, directory, config, backend, folders, agents)


def backend_settings(name: str, options: ServerOptions) -> dict[str, str]:
    """Return the settings of a backend from `--backend-config`. Python-based backends have those of `python` too."""
    settings = options.backend_config.get(name, {})
    if python_based_file(name, options.backend_directory) is None:
        return settings
    return {**options.backend_config.get("python", {}), **settings}


def _find_config(source: ModelSource, options: ServerOptions) -> Any:
    from tritonclient.grpc.model_config_pb2 import ModelConfig

    if source.config is not None:
        config = ModelConfig()
        config.CopyFrom(source.config)
        return config
    config = read_config(source.directory, options.model_config_name)
    if config is None:
        if options.disable_auto_complete_config:
            raise InvalidArgument(
                f"model '{source.name}' has no config.pbtxt, and auto-completion is switched off"
            )
        config = ModelConfig()
    return config


FOLDER = "warmup"
"""Subfolder of the model's folder that contains the `input_data_file`s."""


async def warm_up(context: ModelContext, backend: Backend, signature: Signature) -> None:
    """Execute each warmup sample of a loaded model `count` times (at least once), sequentially.

    Requests bypass batching and statistics. With sequence batching, every instance executes the samples, and control
    inputs and states that a sample omits are those of the first request of a sequence.
    Raises `ServerError`, whose message names the sample.
    """
    stateful = context.config.HasField("sequence_batching") and backend.batches
    instances = range(backend.num_instances) if stateful else (None,)
    for sample in context.config.model_warmup:
        failed = f"failed to run warmup sample '{sample.name}'"
        try:
            for _ in range(sample.count or 1):
                # New inputs for each execution, because the model can write to them.
                for instance in instances:
                    inputs = await asyncio.to_thread(_make_inputs, sample, context)
                    request = InferenceRequest(context.name, inputs)
                    await _execute(request, context, backend, signature, instance)
        except ServerError as error:
            raise ServerError(f"{failed}: {error.message}", error.code) from None
        except Exception as error:
            logger.exception("model '%s' %s", context.name, failed)
            raise InternalError(f"{failed}: {type(error).__name__}: {error}") from None
        logger.debug("model '%s' has run warmup sample '%s'", context.name, sample.name)


async def _execute(
    request: InferenceRequest,
    context: ModelContext,
    backend: Backend,
    signature: Signature,
    instance: int | None,
) -> None:
    added = {}
    if context.config.HasField("sequence_batching"):
        added = _sequence_inputs(context)
        added.update((name, request.inputs.pop(name)) for name in added.keys() & request.inputs.keys())
    batch_size = signature.check(request)
    for name, tensor in added.items():
        if context.config.max_batch_size and tensor.shape[0] < batch_size:
            tensor = Tensor(name, tensor.datatype, np.repeat(tensor.array, batch_size, axis=0))
        request.inputs[name] = tensor
    request.model_version = context.version
    stream = ResponseStream(request, batch_size=batch_size)
    try:
        if instance is None:
            backend.submit(stream)
        else:
            backend.execute([stream], lambda: None, instance)
        async for response in stream:
            response.raise_error()
    finally:
        stream.cancel()  # if the load was cancelled


def _sequence_inputs(context: ModelContext) -> dict[str, Tensor]:
    """Return the inputs that the sequence batcher adds to the first request of a sequence."""
    request = InferenceRequest(context.name, {}, sequence_id=1, sequence_start=True)
    ControlInputs(context.config).give(request)
    states = SequenceStates(context.config, context.directory)
    states.give(states.initial(), request)
    return request.inputs


def _make_inputs(sample: Any, context: ModelContext) -> dict[str, Tensor]:
    return {name: _make_input(name, sample, context) for name in sample.inputs}


def _make_input(name: str, sample: Any, context: ModelContext) -> Tensor:
    """Return the input for the whole batch; the configuration contains the data of one batch entry."""
    spec, batches = sample.inputs[name], context.config.max_batch_size > 0
    batch_size = sample.batch_size or 1
    if batch_size > 1 and not batches:
        raise InvalidArgument(f"batch size {batch_size} for a model that does not support batching")
    datatype, shape = DataType.of_message(spec), tuple(spec.dims)
    if any(extent < 0 for extent in shape):
        raise InvalidArgument(f"dims of input '{name}' must not be negative, got {list(shape)}")
    source = spec.WhichOneof("input_data_type")
    if source == "input_data_file":
        data = _read(name, context.directory / FOLDER, spec.input_data_file)
        array = Tensor.from_wire(name, datatype, shape, data).array
    elif source == "zero_data":
        array = Tensor.zeros(name, datatype, shape).array
    elif source == "random_data":
        array = _random(datatype, shape)
    else:
        raise InvalidArgument(f"input '{name}' has neither zero_data, random_data nor input_data_file")
    if batches:
        array = np.repeat(array[np.newaxis], batch_size, axis=0)
    return Tensor(name, datatype, array)


def _read(name: str, folder: Path, file: str) -> bytes:
    path = (folder / file).resolve()
    if not path.is_relative_to(folder.resolve()):
        raise InvalidArgument(f"input_data_file '{file}' of input '{name}' is not in {folder}")
    try:
        return path.read_bytes()
    except OSError as error:
        raise InvalidArgument(
            f"failed to read input_data_file '{file}' of input '{name}': {error.strerror}"
        ) from None


def _random(datatype: DataType, shape: tuple[int, ...]) -> npt.NDArray[Any]:
    """Return random strings of 16 characters, floats in [0, 1), or integers in the full range of the type."""
    generator, dtype = np.random.default_rng(), datatype.dtype
    if datatype is DataType.BYTES:
        array = np.empty(element_count(shape), np.object_)
        array[:] = [secrets.token_hex(8).encode() for _ in range(len(array))]
        return array.reshape(shape)
    if datatype is DataType.BOOL:
        return generator.integers(0, 2, shape).astype(dtype)
    if dtype.kind in "iu":
        limits = np.iinfo(dtype)
        return generator.integers(limits.min, limits.max, shape, dtype=dtype, endpoint=True)
    return generator.random(shape).astype(dtype)

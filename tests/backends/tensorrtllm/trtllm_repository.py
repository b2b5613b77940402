"""Repositories with a model `tensorrt_llm`, with unfilled placeholders of the template."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2 as pb

from neso.backends.tensorrtllm import signature
from neso.backends.tensorrtllm.parameters import PARAMETERS

NAME = "tensorrt_llm"
PROMPT = list(range(10, 22))


def write_model(
    root: Path,
    model: Path | str,
    *,
    name: str = NAME,
    max_batch_size: int = 8,
    decoupled: bool = True,
    listed: bool = True,
    files: dict[str, Path] | None = None,
    change: Callable[[str], str] = str,
    **parameters: object,
) -> Path:
    """Write a model folder into `root` and return it. `listed`: config.pbtxt lists all inputs and outputs.

    `files`: directories that are copied into it, by target path. `change`: of config.pbtxt.
    """
    folder = root / name
    (folder / "1").mkdir(parents=True)
    for place, directory in (files or {}).items():
        shutil.copytree(directory, folder / place, dirs_exist_ok=True)
    config = pb.ModelConfig(name=name, backend="tensorrtllm", max_batch_size=max_batch_size)
    config.model_transaction_policy.decoupled = decoupled
    if max_batch_size:
        config.dynamic_batching.preferred_batch_size.append(max_batch_size)
        config.dynamic_batching.max_queue_delay_microseconds = 100
    config.instance_group.add(count=1, kind=pb.ModelInstanceGroup.KIND_CPU)
    if listed:
        signature.complete(config)
    values = {parameter.name: f"${{{parameter.name}}}" for parameter in PARAMETERS}
    values |= {"gpt_model_path": str(model), "executor_worker_path": "/opt/trtllmExecutorWorker"}
    values |= {key: str(value) for key, value in parameters.items()}
    for key, value in values.items():
        config.parameters[key].string_value = value
    (folder / "config.pbtxt").write_text(change(text_format.MessageToString(config)))
    return folder

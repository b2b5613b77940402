"""Reads which adapter a request wants out of its tensors and parameters."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from neso.generation import LoraRequest, LoraTensors
from neso.generation.request import TASK_PREFIX, FloatType
from neso.server.errors import InvalidArgument
from neso.server.inference_request import InferenceRequest

_DTYPES: dict[np.dtype[Any], FloatType] = {
    np.dtype(np.float32): "float32",
    np.dtype(np.float16): "float16",
    np.dtype(ml_dtypes.bfloat16): "bfloat16",
}


def requested_adapter(request: InferenceRequest, values: dict[str, Any]) -> LoraRequest | None:
    """The adapter, by `lora_name` among the sampling parameters, which is taken out of `values`, or by tensors.

    `lora_path` beside the name says where it is, on the server's disk. Raises `InvalidArgument`.
    """
    name, path = values.pop("lora_name", None), values.pop("lora_path", None)
    task = request.inputs.get("lora_task_id")
    if task is None:
        for tensor in ("lora_weights", "lora_config"):
            if tensor in request.inputs:
                raise InvalidArgument(f"{tensor}: needs lora_task_id")
        return None if name is None and path is None else _by_name(name, path)
    if name is not None:
        raise InvalidArgument("lora_name: cannot come together with lora_task_id")
    weights, config = (request.inputs.get(name) for name in ("lora_weights", "lora_config"))
    return adapter_of_task(
        int(task.array.reshape(-1)[0]),
        None if weights is None else weights.array,
        None if config is None else config.array,
    )


def adapter_of_task(
    task_id: int, weights: npt.NDArray[Any] | None = None, config: npt.NDArray[np.int32] | None = None
) -> LoraRequest:
    """The adapter that clients know by a number. The first time, it comes with its tensors (TensorRT-LLM's form):
    `weights` [rows, width] and `config` [rows, 3]. Raises `InvalidArgument`.
    """
    return LoraRequest(name=f"{TASK_PREFIX}{task_id}", tensors=_tensors(weights, config))


def _by_name(name: object, path: object) -> LoraRequest:
    if not isinstance(name, str) or not name:
        raise InvalidArgument("lora_name: must be a name")
    if path is not None and not isinstance(path, str):
        raise InvalidArgument("lora_path: must be a path")
    return LoraRequest(name=name, path=path)


def _tensors(weights: npt.NDArray[Any] | None, config: npt.NDArray[np.int32] | None) -> LoraTensors | None:
    """None if neither has come."""
    if weights is None and config is None:
        return None
    if weights is None or config is None:
        raise InvalidArgument("lora_weights: must come together with lora_config")
    rows, columns = weights, config
    # A batch of one may be around them; newer clients add a column that says whether the adapter is DoRA.
    if rows.ndim == 3 and len(rows) == 1:
        rows = rows[0]
    columns = columns.reshape(-1, columns.shape[-1])
    if rows.ndim != 2 or columns.shape[1] not in (3, 4) or len(rows) != len(columns):
        raise InvalidArgument(
            f"lora_weights: must be [rows, values], lora_config [rows, 3], got {list(rows.shape)} and "
            f"{list(columns.shape)}"
        )
    if columns.shape[1] == 4 and columns[:, 3].any():
        raise InvalidArgument("lora_config: DoRA is not supported")
    dtype = _DTYPES.get(rows.dtype)
    if dtype is None:
        raise InvalidArgument(f"lora_weights: must be floats of 32 or 16 bits, got {rows.dtype}")
    return LoraTensors(
        dtype=dtype,
        width=rows.shape[1],
        weights=rows.tobytes(),
        config=[(int(row[0]), int(row[1]), int(row[2])) for row in columns],
    )

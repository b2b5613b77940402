"""Tensors of a text-generation model: signature, and conversion of input tensors to requests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import orjson

from neso.backends.request_tensors import (
    TensorField,
    add_inputs,
    add_outputs,
    bool_input,
    json_object,
    request_logprobs,
    text_input,
)
from neso.generation import (
    DraftTokens,
    GenerationRequest,
    InvalidParameter,
    LoraRequest,
    LoraTensors,
    SamplingParams,
)
from neso.generation.request import TASK_PREFIX, FloatType
from neso.server.errors import InvalidArgument
from neso.server.inference_request import InferenceRequest

VECTORS = ("prompt_embedding_table", "prompt_embeds")
"""Inputs of shape [rows, hidden_size]."""
IMAGE = "image"
"""Input of shape [images]: base64-encoded files."""

INPUTS = (
    TensorField("text_input", "TYPE_STRING"),
    TensorField("stream", "TYPE_BOOL", optional=True),
    TensorField("sampling_parameters", "TYPE_STRING", optional=True),
    TensorField("exclude_input_in_output", "TYPE_BOOL", optional=True),
    TensorField("return_finish_reason", "TYPE_BOOL", optional=True),
    TensorField("return_cumulative_logprob", "TYPE_BOOL", optional=True),
    TensorField("return_logprobs", "TYPE_BOOL", optional=True),
    TensorField("return_num_input_tokens", "TYPE_BOOL", optional=True),
    TensorField("return_num_output_tokens", "TYPE_BOOL", optional=True),
    TensorField("return_context_logits", "TYPE_BOOL", optional=True),
    TensorField("return_generation_logits", "TYPE_BOOL", optional=True),
    TensorField("prompt_vocab_size", "TYPE_INT32", optional=True),
    TensorField(IMAGE, "TYPE_STRING", (-1,), optional=True),
    # LoRA adapters, as in TensorRT-LLM; config.pbtxt can declare a different type for lora_weights.
    TensorField("lora_task_id", "TYPE_UINT64", optional=True),
    TensorField("lora_weights", "TYPE_FP16", (-1, -1), optional=True),
    TensorField("lora_config", "TYPE_INT32", (-1, 3), optional=True),
    *(TensorField(name, "TYPE_FP32", (-1, -1), optional=True) for name in VECTORS),
    # Draft tokens, as in TensorRT-LLM.
    TensorField("draft_input_ids", "TYPE_INT32", (-1,), optional=True),
    TensorField("draft_logits", "TYPE_FP32", (-1, -1), optional=True),
    TensorField("draft_acceptance_threshold", "TYPE_FP32", optional=True),
)

OUTPUTS = (
    TensorField("text_output", "TYPE_STRING", (-1,)),
    TensorField("finish_reason", "TYPE_STRING", (-1,)),
    TensorField("cumulative_logprob", "TYPE_FP32", (-1,)),
    TensorField("logprobs", "TYPE_STRING", (-1,)),
    TensorField("num_input_tokens", "TYPE_UINT32"),
    TensorField("num_output_tokens", "TYPE_UINT32", (-1,)),
    TensorField("context_logits", "TYPE_FP32", (-1, -1)),
    TensorField("generation_logits", "TYPE_FP32", (-1, -1, -1)),
    TensorField("total_draft_tokens", "TYPE_INT32"),
    TensorField("total_accepted_draft_tokens", "TYPE_INT32"),
    TensorField("acceptance_rate", "TYPE_FP32"),
)
"""One element per sequence, except logits: [prompt, vocab_size] and [sequence, token, vocab_size]."""


def complete_signature(config: Any) -> None:
    """Add missing inputs and outputs to the `ModelConfig`, and make the model decoupled."""
    config.model_transaction_policy.decoupled = True
    config.max_batch_size = 0
    add_inputs(config, INPUTS)
    add_outputs(config, OUTPUTS)


_DTYPES: dict[np.dtype[Any], FloatType] = {
    np.dtype(np.float32): "float32",
    np.dtype(np.float16): "float16",
    np.dtype(ml_dtypes.bfloat16): "bfloat16",
}


def requested_adapter(request: InferenceRequest, values: dict[str, Any]) -> LoraRequest | None:
    """Return the LoRA adapter given by `lora_name` in `values` or by tensors; None without an adapter.

    `lora_path` in `values` is its path on the server's disk. Both are removed from `values`. Raises `InvalidArgument`.
    """
    name, path = values.pop("lora_name", None), values.pop("lora_path", None)
    task = request.inputs.get("lora_task_id")
    if task is None:
        for tensor in ("lora_weights", "lora_config"):
            if tensor in request.inputs:
                raise InvalidArgument(f"{tensor}: needs lora_task_id")
        return None if name is None and path is None else _by_name(name, path)
    if name is not None:
        raise InvalidArgument("lora_name: cannot be combined with lora_task_id")
    weights, config = (request.inputs.get(name) for name in ("lora_weights", "lora_config"))
    return adapter_of_task(
        int(task.array.reshape(-1)[0]),
        None if weights is None else weights.array,
        None if config is None else config.array,
    )


def adapter_of_task(
    task_id: int, weights: npt.NDArray[Any] | None = None, config: npt.NDArray[np.int32] | None = None
) -> LoraRequest:
    """Return the adapter that is identified by a number (TensorRT-LLM). The first request contains its tensors:
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
    """Create the adapter's tensors; None if neither is given."""
    if weights is None and config is None:
        return None
    if weights is None or config is None:
        raise InvalidArgument("lora_weights: must be sent together with lora_config")
    rows, columns = weights, config
    # Can have a batch dimension of 1; newer clients add a fourth column, the DoRA flag.
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


DRAFT_NAMES = ("draft_input_ids", "draft_logits", "draft_acceptance_threshold")


def read_draft(ids: Any, logits: Any, threshold: Any) -> DraftTokens | None:
    """Read draft tokens from the values of `DRAFT_NAMES`, each an array, a list or None. Raises `InvalidArgument`."""
    if ids is None:
        if threshold is not None or logits is not None:
            raise InvalidArgument("draft_input_ids: must be sent with the other tensors of a draft")
        return None
    try:
        tokens = np.asarray(ids).reshape(-1)
        if tokens.size and tokens.dtype.kind not in "iu":
            raise ValueError("must be integers")
        return DraftTokens(
            tokens.tolist(),
            None if logits is None else np.asarray(logits, np.float32).reshape(len(tokens), -1),
            None if threshold is None else float(np.asarray(threshold).reshape(-1)[0]),
        )
    except (ValueError, TypeError, IndexError) as error:
        raise InvalidArgument(f"{', '.join(DRAFT_NAMES)}: {error}") from None


@dataclass(frozen=True, slots=True)
class TensorRequest:
    """A text-generation request with the tensors of `INPUTS`. `requested`: names of outputs besides text_output."""

    generation: GenerationRequest
    prompt: str
    stream: bool
    exclude_input: bool
    requested: frozenset[str]


SCALAR_INPUTS: dict[str, type] = {
    "text_input": str,
    "stream": bool,
    "sampling_parameters": str,
    "exclude_input_in_output": bool,
    "return_finish_reason": bool,
    "return_logprobs": bool,
    "return_num_input_tokens": bool,
    "return_num_output_tokens": bool,
}
"""Inputs that can be Python values instead of tensors; the outputs of such requests need no tensors either."""


def read_tensors(request: InferenceRequest) -> TensorRequest:
    """Read a request from its input tensors and parameters. Raises `InvalidArgument`."""
    flags = {
        name: bool_input(request, name, default=False)
        for name in request.inputs
        if name == "stream" or name.startswith("return_")
    }
    values: dict[str, Any] = {
        "text_input": text_input(request, "text_input"),
        "exclude_input_in_output": bool_input(request, "exclude_input_in_output", default=True),
    }
    if "sampling_parameters" in request.inputs:
        values["sampling_parameters"] = text_input(request, "sampling_parameters")
    return read_scalars(request, values | flags)


def read_scalars(request: InferenceRequest, scalars: Mapping[str, Any]) -> TensorRequest:
    """Read a request whose `SCALAR_INPUTS` are Python values. Raises `InvalidArgument`."""
    prompt: str = scalars["text_input"]
    requested: set[str] = set()
    for name, value in scalars.items():
        if name.startswith("return_") and value:
            requested.add(name.removeprefix("return_"))
    values = _sampling_values(request, scalars)
    lora = requested_adapter(request, values)
    draft = _draft(request, values)
    request_logprobs(values, requested)
    for name in requested & {"context_logits", "generation_logits"}:
        values[f"return_{name}"] = True
    try:
        sampling = SamplingParams.from_mapping(values)
    except InvalidParameter as error:
        raise InvalidArgument(str(error)) from None
    return TensorRequest(
        # The client's request id need not be unique; the engine generates a unique id.
        generation=GenerationRequest(
            prompt,
            sampling,
            priority=request.priority,
            queue_timeout_ms=request.timeout_us / 1000 if request.timeout_us else None,
            lora=lora,
            draft=draft,
            **(_vectors(request) if request.inputs else {}),
        ),
        prompt=prompt,
        stream=bool(scalars.get("stream", False)),
        exclude_input=bool(scalars.get("exclude_input_in_output", True)),
        requested=frozenset(requested),
    )


def _vectors(request: InferenceRequest) -> dict[str, Any]:
    """Read embeddings and images of the prompt as fields of `GenerationRequest`."""
    fields: dict[str, Any] = {name: request.inputs[name].array for name in VECTORS if name in request.inputs}
    size = request.inputs.get("prompt_vocab_size")
    if size is not None:
        fields["prompt_vocab_size"] = int(size.array.reshape(-1)[0])
    if IMAGE in request.inputs:
        fields["images"] = tuple(request.inputs[IMAGE].strings())
    return fields


_NOT_SCALAR = frozenset(
    {
        "draft_input_ids",
        "stop",
        "stop_token_ids",
        "stop_words",
        "bad_words",
        "allowed_token_ids",
        "logit_bias",
        "embedding_bias",
    }
)


def _draft(request: InferenceRequest, values: dict[str, Any]) -> DraftTokens | None:
    """Read draft tokens from TensorRT-LLM's tensors or (except logits) `values`, and remove them from `values`."""
    ids, threshold = values.pop("draft_input_ids", None), values.pop("draft_acceptance_threshold", None)
    if ids is None and threshold is None and request.inputs.keys().isdisjoint(DRAFT_NAMES):
        return None
    given = {"draft_input_ids": ids, "draft_acceptance_threshold": threshold}
    for name in DRAFT_NAMES:
        tensor = request.inputs.get(name)
        if tensor is not None:
            given[name] = tensor.array
    return read_draft(*(given.get(name) for name in DRAFT_NAMES))


def _sampling_values(request: InferenceRequest, scalars: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of `sampling_parameters` (a JSON object) if given, otherwise the request's parameters."""
    if "sampling_parameters" in scalars:
        return json_object("sampling_parameters", scalars["sampling_parameters"])
    return {name: _from_json(name, value) for name, value in request.parameters.items()}


def _from_json(name: str, value: object) -> Any:
    """Parse lists and objects, which request parameters contain as JSON text: `"stop": "[\\"a\\", \\"b\\"]"`."""
    if isinstance(value, str) and value[:1] in ("[", "{") and name in _NOT_SCALAR:
        try:
            return orjson.loads(value)
        except orjson.JSONDecodeError:
            return value
    return value

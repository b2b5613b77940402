"""Backend `embedding`: embedding models and rerankers on Neso's engine."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np

from neso.backends.llm.engine_backend import EngineBackend
from neso.backends.llm.engine_options import engine_config
from neso.backends.request_tensors import TensorField, add_inputs, add_outputs
from neso.engine.config import EngineConfig
from neso.generation import InvalidParameter, PooledOutput, PoolingParams, PoolingRequest
from neso.generation.pooling import Scoring, pool_all
from neso.server.errors import InvalidArgument
from neso.server.inference_request import InferenceRequest
from neso.server.inference_response import InferenceResponse, ResponseStream
from neso.server.tensor import DataType, Tensor

Value = TypeVar("Value", bool, int)


class EmbeddingBackend(EngineBackend):
    """Computes embeddings, class probabilities or scores of text pairs."""

    @classmethod
    def auto_complete(
        cls, config: Any, directory: Path, version_directory: Path, backend_config: Mapping[str, str]
    ) -> None:
        complete_config(config)

    def engine_config(self) -> EngineConfig:
        return engine_config(self.context.config, self.context.version_directory)

    async def load(self) -> None:
        await super().load()
        if self.pooling is None:
            await self.unload()
            raise InvalidArgument(f"the runner of model '{self.context.name}' does not support embeddings")

    @property
    def language_model(self) -> None:
        return None

    def submit(self, request: ResponseStream) -> None:
        self.run_task(request, self._pool_texts(request))

    async def _pool_texts(self, stream: ResponseStream) -> None:
        request = stream.request
        stream.timeline.compute_start = time.monotonic_ns()
        lists = [request.inputs[name] for name in ("text_input", "text_pair") if name in request.inputs]
        stream.count_sequences(max(math.prod(tensor.shape) for tensor in lists))
        texts = request.inputs["text_input"].strings()
        if not texts:
            raise InvalidParameter("text_input", "is empty")
        if "text_pair" in request.inputs:
            tensors = await self._scores(stream, texts)
        elif "probabilities" in request.requested_outputs:
            pooled = await self._pool_all(request, texts, PoolingParams(task="classify"))
            tensors = [_matrix("probabilities", pooled), _counts(pooled)]
        else:
            pooled = await self._pool_all(request, texts, _params(request))
            tensors = [_matrix("embedding", pooled), _counts(pooled)]
        model, version = self.context.name, self.context.version
        stream.send(InferenceResponse(model, version, outputs=tensors), final=True)

    async def _scores(self, stream: ResponseStream, texts: list[str]) -> list[Tensor]:
        request = stream.request
        scoring = Scoring.of(self.pooling, texts, request.inputs["text_pair"].strings())
        stream.count_sequences(len(scoring.prompts))
        pooled = await self._pool_all(request, scoring.prompts, scoring.params)
        return [Tensor("score", DataType.FP32, scoring.scores(pooled))]

    async def _pool_all(
        self, request: InferenceRequest, prompts: list[Any], params: PoolingParams
    ) -> list[PooledOutput]:
        cut = -1 if _value(request, "truncate", bool) else None
        requests = [
            PoolingRequest(prompt, params, priority=request.priority, truncate_prompt_tokens=cut)
            for prompt in prompts
        ]
        return await pool_all(self.pool, requests)


def _params(request: InferenceRequest) -> PoolingParams:
    return PoolingParams(
        dimensions=_value(request, "dimensions", int), normalize=_value(request, "normalize", bool)
    )


def _value(request: InferenceRequest, name: str, kind: type[Value]) -> Value | None:
    """Return a scalar input, or the request parameter with this name; None if both are absent."""
    tensor = request.inputs.get(name)
    value = request.parameters.get(name) if tensor is None else tensor.array.reshape(-1)[0].item()
    try:
        return msgspec.convert(value, kind | None, strict=False)
    except msgspec.ValidationError as error:
        raise InvalidParameter(name, f"{error}, got {value!r}") from None


def _matrix(name: str, pooled: list[PooledOutput]) -> Tensor:
    return Tensor(name, DataType.FP32, np.stack([output.values for output in pooled]))


def _counts(pooled: list[PooledOutput]) -> Tensor:
    counts = np.array([output.num_prompt_tokens for output in pooled], np.uint32)
    return Tensor("num_input_tokens", DataType.UINT32, counts)


INPUTS = (
    TensorField("text_input", "TYPE_STRING", (-1,)),
    TensorField("text_pair", "TYPE_STRING", (-1,), optional=True),
    TensorField("dimensions", "TYPE_INT32", optional=True),
    TensorField("normalize", "TYPE_BOOL", optional=True),
    TensorField("truncate", "TYPE_BOOL", optional=True),
)
"""`text_pair`: the second text of each pair to score."""

OUTPUTS = (
    TensorField("embedding", "TYPE_FP32", (-1, -1)),
    TensorField("score", "TYPE_FP32", (-1,)),
    TensorField("probabilities", "TYPE_FP32", (-1, -1)),
    TensorField("num_input_tokens", "TYPE_UINT32", (-1,)),
)
"""`score` is returned for text pairs, `probabilities` (of classes) if requested, otherwise `embedding`."""


def complete_config(config: Any) -> None:
    """Add missing inputs and outputs to a `ModelConfig`."""
    config.max_batch_size = 0
    add_inputs(config, INPUTS)
    add_outputs(config, OUTPUTS)

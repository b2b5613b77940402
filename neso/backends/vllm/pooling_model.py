"""A model on vLLM that gives vectors, as front ends see it."""

from __future__ import annotations

from typing import Any

import numpy as np

from neso.backends.vllm import library
from neso.backends.vllm.engine import VllmEngine
from neso.generation import (
    InvalidParameter,
    PooledOutput,
    PoolingInfo,
    PoolingRequest,
    TokenizerLike,
    encode_text,
)
from neso.generation.pooling import PoolingKind, PoolingTask


class VllmPoolingModel:
    """`PoolingModel` of `neso.generation`."""

    def __init__(self, engine: VllmEngine, text: TokenizerLike) -> None:
        self._engine = engine
        self.text = text
        config = engine.model_config
        names: tuple[PoolingTask, ...] = ("embed", "classify")
        labels = getattr(config.hf_config, "id2label", None) or {}
        self.pooling: PoolingInfo | None = PoolingInfo(
            tasks=frozenset(name for name in names if name in engine.tasks),
            dimensions=int(getattr(config, "embedding_size", None) or config.get_hidden_size()),
            kind=_kind(config.pooler_config),
            labels=[str(label) for label in labels.values()] if "classify" in engine.tasks else [],
        )

    @property
    def max_model_len(self) -> int:
        """See `PoolingModel.max_model_len`."""
        return self._engine.max_model_len

    async def pool(self, request: PoolingRequest) -> PooledOutput:
        """See `PoolingModel.pool`."""
        params = request.params
        if params.pooling is not None:
            raise InvalidParameter("pooling", "of models on vLLM is what their files say")
        if params.task not in self._engine.tasks:
            raise InvalidParameter("task", f"this model does not {params.task}")
        token_ids = await self._token_ids(request)
        activation = params.activation if params.task == "classify" else params.normalize
        output = await self._engine.encode(
            {"prompt_token_ids": token_ids},
            library.pooling_params(params.task, dimensions=params.dimensions, activation=activation),
            priority=request.priority,
        )
        return PooledOutput(request.request_id, vector_of(output), len(output.prompt_token_ids))

    async def _token_ids(self, request: PoolingRequest) -> list[int]:
        prompt = request.prompt
        if isinstance(prompt, tuple):
            raise InvalidParameter("prompt", "models on vLLM take no pairs of texts here")
        if isinstance(prompt, str):
            prompt = await encode_text(self.text, prompt, add_special_tokens=request.add_special_tokens)
        if not prompt:
            raise InvalidParameter("prompt", "is empty")
        most = self.max_model_len
        cut = request.truncate_prompt_tokens
        if cut is not None:
            prompt = prompt[: most if cut < 0 else min(cut, most)]
        if len(prompt) > most:
            raise InvalidParameter(
                "prompt", f"is {len(prompt)} tokens long; this model's context is {most} tokens"
            )
        return prompt


def _kind(pooler: Any) -> PoolingKind:
    """How vectors of tokens become one, as far as vLLM says; its field had another name in earlier versions."""
    named = getattr(pooler, "seq_pooling_type", None) or getattr(pooler, "pooling_type", None)
    kinds: dict[str, PoolingKind] = {"MEAN": "mean", "CLS": "cls"}
    return kinds.get(str(named).upper(), "last")


def vector_of(output: Any) -> np.ndarray[Any, np.dtype[np.float32]]:
    """float32[D] of a `PoolingRequestOutput`."""
    return np.asarray(output.outputs.data.float().cpu().numpy(), np.float32).reshape(-1)

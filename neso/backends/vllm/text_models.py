"""Text-generation and pooling interfaces of a vLLM engine, and its tokenizer."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Any

import numpy as np

from neso.backends.vllm import library
from neso.backends.vllm.conversion import (
    OutputConverter,
    prompt_of,
    reject_unsupported_inputs,
    to_vllm_sampling,
)
from neso.backends.vllm.engine import VllmEngine
from neso.backends.vllm.model_files import Adapters, UnknownAdapter
from neso.engine.text.tokenizer import Tokenizer
from neso.engine.text.tokenizer_files import TokenizerError
from neso.engine.weights.hub import ModelNotFound, resolve_model
from neso.engine.weights.source import CheckpointError
from neso.generation import (
    GenerationOutput,
    GenerationRequest,
    InvalidParameter,
    LoraRequest,
    PooledOutput,
    PoolingInfo,
    PoolingRequest,
    SamplingDefaults,
    TokenizerLike,
    check_prompt_length,
    cut_text,
    encode_text,
)
from neso.generation.pooling import PoolingKind, PoolingTask
from neso.server.errors import NotFound


class VllmLanguageModel:
    """Implements `LanguageModel` and `SupportsLora` of `neso.generation`."""

    def __init__(
        self, engine: VllmEngine, text: TokenizerLike, adapters: Adapters, default_sampling: SamplingDefaults
    ) -> None:
        self._engine = engine
        self._adapters = adapters
        self.text = text
        self.default_sampling = default_sampling

    @property
    def max_model_len(self) -> int:
        """See `LanguageModel.max_model_len`."""
        return self._engine.max_model_len

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[GenerationOutput, None]:
        """See `LanguageModel.generate`. Raises `ServerError` if the engine fails."""
        reject_unsupported_inputs(request)
        params = self._engine.sampling_params(to_vllm_sampling(request.sampling), stream=True)
        lora = self._adapter(request.lora)
        token_ids = await self._token_ids(request)
        check_prompt_length(len(token_ids), self.max_model_len)
        if request.images:
            prompt = await asyncio.to_thread(prompt_of, token_ids, request.images, request.cache_salt)
        else:
            prompt = prompt_of(token_ids, (), request.cache_salt)
        outputs = OutputConverter(request.sampling)
        generation = self._engine.generate(prompt, params, lora=lora, priority=request.priority)
        async with aclosing(generation) as results:
            async for result in results:
                yield outputs.of(result)

    async def _token_ids(self, request: GenerationRequest) -> list[int]:
        if not isinstance(request.prompt, str):
            return request.prompt
        return await encode_text(
            self.text,
            request.prompt,
            add_special_tokens=request.add_special_tokens,
            max_model_len=self.max_model_len,
        )

    def _adapter(self, lora: LoraRequest | None) -> Any:
        if lora is None:
            return None
        if lora.tensors is not None or lora.path is not None:
            raise InvalidParameter("lora_name", "adapters in requests are not supported by models on vLLM")
        try:
            return self._adapters.find(lora.name)
        except UnknownAdapter as error:
            raise InvalidParameter("lora_name", str(error)) from None

    # -- adapters: neso.generation.SupportsLora ---------------------------------------------------------------

    @property
    def allows_runtime_lora(self) -> bool:
        """Set by vLLM's environment variable `VLLM_ALLOW_RUNTIME_LORA_UPDATING`."""
        switch = os.environ.get("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "")
        return self._adapters.enabled and switch.strip().lower() in ("1", "true")

    def list_loras(self) -> dict[str, str | None]:
        """See `SupportsLora.list_loras`."""
        return dict(self._adapters.paths())

    async def load_lora(self, lora: LoraRequest) -> None:
        """See `SupportsLora.load_lora`."""
        before = self._adapters.paths().get(lora.name)
        old = self._adapters.find(lora.name) if before is not None else None
        new = self._adapters.put(lora.name, lora.path or "")
        try:
            await self._engine.add_lora(new)
        except BaseException:
            if old is None:
                self._adapters.remove(lora.name)
            else:
                self._adapters.put(lora.name, before or "")
            raise
        if old is not None:
            await self._engine.remove_lora(old.lora_int_id)

    async def unload_lora(self, name: str) -> None:
        """See `SupportsLora.unload_lora`."""
        try:
            removed = self._adapters.remove(name)
        except KeyError:
            raise NotFound(f"there is no adapter '{name}'") from None
        await self._engine.remove_lora(removed.lora_int_id)


class VllmPoolingModel:
    """Implements `PoolingModel` of `neso.generation`."""

    def __init__(self, engine: VllmEngine, text: TokenizerLike) -> None:
        self._engine = engine
        self.text = text
        config = engine.model_config
        names: tuple[PoolingTask, ...] = ("embed", "classify")
        labels = getattr(config.hf_config, "id2label", None) or {}
        self.pooling: PoolingInfo | None = PoolingInfo(
            tasks=frozenset(name for name in names if name in engine.tasks),
            dimensions=int(getattr(config, "embedding_size", None) or config.get_hidden_size()),
            kind=_pooling_kind(config.pooler_config),
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
            raise InvalidParameter("pooling", "cannot be set for models on vLLM")
        if params.task not in self._engine.tasks:
            raise InvalidParameter("task", f"this model does not support '{params.task}'")
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
            raise InvalidParameter("prompt", "text pairs are not supported by models on vLLM")
        most = self.max_model_len
        cut = request.truncate_prompt_tokens
        if isinstance(prompt, str):
            text, at_least = await asyncio.to_thread(cut_text, self.text, prompt, most)
            if at_least and cut is None:
                raise InvalidParameter(
                    "prompt", f"is at least {at_least} tokens long; this model's context is {most} tokens"
                )
            prompt = await encode_text(self.text, text, add_special_tokens=request.add_special_tokens)
        if not prompt:
            raise InvalidParameter("prompt", "is empty")
        if cut is not None:
            prompt = prompt[: most if cut < 0 else min(cut, most)]
        if len(prompt) > most:
            raise InvalidParameter(
                "prompt", f"is {len(prompt)} tokens long; this model's context is {most} tokens"
            )
        return prompt


def _pooling_kind(pooler: Any) -> PoolingKind:
    """Return the model's pooling type. The field had a different name in earlier versions of vLLM."""
    named = getattr(pooler, "seq_pooling_type", None) or getattr(pooler, "pooling_type", None)
    kinds: dict[str, PoolingKind] = {"MEAN": "mean", "CLS": "cls"}
    return kinds.get(str(named).upper(), "last")


def vector_of(output: Any) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Return the vector of a `PoolingRequestOutput`: float32[D]."""
    return np.asarray(output.outputs.data.float().cpu().numpy(), np.float32).reshape(-1)


def text_tools(model: str, revision: str | None, tokenizer: Any) -> TokenizerLike:
    """Return Neso's tokenizer of a checkpoint, or a wrapper of vLLM's `tokenizer` if it cannot be loaded. Blocks."""
    try:
        return Tokenizer.from_model(resolve_model(model, revision))
    except (TokenizerError, CheckpointError, ModelNotFound):
        return TransformersText(tokenizer)


class TransformersText:
    """Implements `TokenizerLike` with a tokenizer of transformers."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    @property
    def has_chat_template(self) -> bool:
        """Whether there is a chat template."""
        return bool(self.chat_template_source)

    @property
    def chat_template_source(self) -> str:
        """See `TokenizerLike.chat_template_source`."""
        source = getattr(self._tokenizer, "chat_template", None) or ""
        return "\n".join(map(str, source.values())) if isinstance(source, Mapping) else str(source)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """See `TokenizerLike.encode`."""
        return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens))

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """See `TokenizerLike.decode`."""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens))

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """See `TokenizerLike.apply_chat_template`."""
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    list(messages),
                    tools=None if tools is None else list(tools),
                    add_generation_prompt=add_generation_prompt,
                    tokenize=False,
                    **variables,
                )
            )
        except Exception as error:  # templates may raise any exception
            raise InvalidParameter("messages", f"the chat template rejected them: {error}") from None

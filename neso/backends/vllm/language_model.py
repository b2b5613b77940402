"""A model on vLLM as front ends for language models see it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from neso.backends.vllm.adapters import Adapters, UnknownAdapter
from neso.backends.vllm.engine import VllmEngine
from neso.backends.vllm.generation import Outputs, prompt_of, refuse_unknown
from neso.backends.vllm.sampling import from_params
from neso.generation import (
    GenerationOutput,
    GenerationRequest,
    InvalidParameter,
    LoraRequest,
    SamplingDefaults,
    TokenizerLike,
    check_prompt_length,
    encode_text,
)
from neso.server.errors import NotFound


class VllmLanguageModel:
    """`LanguageModel` and `SupportsLora` of `neso.generation`."""

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
        """See `LanguageModel.generate`; raises `ServerError` when the engine fails."""
        refuse_unknown(request)
        params = self._engine.sampling_params(from_params(request.sampling), stream=True)
        lora = self._adapter(request.lora)
        token_ids = await self._token_ids(request)
        check_prompt_length(len(token_ids), self.max_model_len)
        if request.images:
            prompt = await asyncio.to_thread(prompt_of, token_ids, request.images, request.cache_salt)
        else:
            prompt = prompt_of(token_ids, (), request.cache_salt)
        outputs = Outputs(request.sampling)
        generation = self._engine.generate(prompt, params, lora=lora, priority=request.priority)
        async with aclosing(generation) as results:
            async for result in results:
                yield outputs.of(result)

    async def _token_ids(self, request: GenerationRequest) -> list[int]:
        if not isinstance(request.prompt, str):
            return request.prompt
        return await encode_text(self.text, request.prompt, add_special_tokens=request.add_special_tokens)

    def _adapter(self, lora: LoraRequest | None) -> Any:
        if lora is None:
            return None
        if lora.tensors is not None or lora.path is not None:
            raise InvalidParameter("lora_name", "requests to models on vLLM cannot bring adapters along")
        try:
            return self._adapters.find(lora.name)
        except UnknownAdapter as error:
            raise InvalidParameter("lora_name", str(error)) from None

    # -- adapters: neso.generation.SupportsLora ---------------------------------------------------------------

    @property
    def allows_runtime_lora(self) -> bool:
        """What vLLM's own server goes by."""
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

"""Turns a request for a vector into one for the engine."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from neso.engine.core.request import EngineRequest
from neso.engine.ipc.messages import EngineInfo
from neso.engine.open_tokenizer import EngineText
from neso.engine.sampling.limits import check_tokens
from neso.generation import InvalidParameter, PoolingParams, PoolingRequest, SamplingParams

_NOTHING_SAMPLED = SamplingParams()


@dataclass(frozen=True, slots=True)
class PoolingInput:
    """Tokenizes and checks against what one model can pool."""

    tokenizer: EngineText
    info: EngineInfo

    def process(self, request: PoolingRequest) -> EngineRequest:
        """Raises `InvalidParameter` for what the model cannot do."""
        params = self._params(request)
        token_ids, token_types = self._tokens(request)
        return EngineRequest(
            request_id=request.request_id,
            prompt_token_ids=token_ids,
            sampling=_NOTHING_SAMPLED,
            max_tokens=1,
            priority=request.priority,
            pooling=params,
            # That of generation without a salt: what both have in common is found.
            cache_identity=("",),
            token_type_ids=token_types if any(token_types) else [],
        )

    @property
    def max_tokens(self) -> int:
        """The longest prompt. A decoder's cache holds one token more than is pooled."""
        return self.info.max_model_len - 1 if self.info.num_blocks else self.info.max_model_len

    def _params(self, request: PoolingRequest) -> PoolingParams:
        params, pooling = request.params, self.info.pooling
        if pooling is None:
            raise InvalidParameter("task", f"the runner of this model ({self.info.runner}) gives no vectors")
        if params.task not in pooling.tasks:
            raise InvalidParameter("task", f"this model has no classifier: it cannot {params.task}")
        if params.dimensions is not None and params.dimensions > pooling.dimensions:
            raise InvalidParameter(
                "dimensions", f"is {params.dimensions}, embeddings of this model have {pooling.dimensions}"
            )
        # What the engine pools by depends on the kind: it must not be left open.
        return msgspec.structs.replace(params, pooling=params.pooling or pooling.kind)

    def _tokens(self, request: PoolingRequest) -> tuple[list[int], list[int]]:
        limit = self._truncation(request)
        prompt = request.prompt
        if isinstance(prompt, list):
            check_tokens("prompt", prompt, self.info.vocab_size)
            token_ids, token_types = prompt[:limit], list[int]()
        else:
            text, second = (prompt, None) if isinstance(prompt, str) else prompt
            token_ids, token_types = self.tokenizer.encode_pair(
                text, second, add_special_tokens=request.add_special_tokens, max_tokens=limit
            )
        if not token_ids:
            raise InvalidParameter("prompt", "is empty")
        if len(token_ids) > self.max_tokens:
            raise InvalidParameter(
                "prompt", f"is {len(token_ids)} tokens long; this model takes at most {self.max_tokens}"
            )
        return token_ids, token_types

    def _truncation(self, request: PoolingRequest) -> int | None:
        wanted = request.truncate_prompt_tokens
        if wanted is None:
            return None
        if wanted == -1:
            return self.max_tokens
        if not 1 <= wanted <= self.max_tokens:
            raise InvalidParameter(
                "truncate_prompt_tokens", f"must be -1 or between 1 and {self.max_tokens}, got {wanted}"
            )
        return wanted

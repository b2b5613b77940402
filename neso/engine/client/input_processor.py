"""Converts client requests to engine-core requests: tokenization and checks."""

from __future__ import annotations

import msgspec

from neso.engine.client.request_arrays import (
    checked_draft,
    embeddings_as_prompt,
    insert_virtual_tokens,
)
from neso.engine.core.request import EngineRequest, InputEmbeddings, PromptImage
from neso.engine.ipc.messages import EngineInfo
from neso.engine.lora.config import LORA_DISABLED
from neso.engine.sampling.limits import check_sampling, check_scores, check_tokens
from neso.engine.text.tokenizer import NO_TOKENIZER, EngineTokenizer
from neso.engine.vision.image_prompt import ImagePrompt
from neso.generation import (
    GenerationRequest,
    InvalidParameter,
    PoolingParams,
    PoolingRequest,
    SamplingParams,
    check_prompt_length,
    cut_text,
    encode_prompt,
)

_NO_SAMPLING = SamplingParams()


class InputProcessor:
    """Tokenizes requests and checks them against the limits of one model. Thread-safe."""

    def __init__(
        self, tokenizer: EngineTokenizer, info: EngineInfo, images: ImagePrompt | None = None
    ) -> None:
        self._tokenizer = tokenizer
        self._max_model_len = info.max_model_len
        self._info = info
        self._images = images
        # The configuration can name tokens for which the model has no logits.
        self._eos_token_ids = [token for token in tokenizer.eos_token_ids if 0 <= token < info.vocab_size]

    def process(self, request: GenerationRequest) -> EngineRequest:
        """Tokenize and check a generation request. Raises `InvalidParameter` if the model does not support it.

        `max_tokens` is limited by the model length; a sequence that reaches this limit has the finish reason "length".
        """
        info, params = self._info, request.sampling
        if not info.generates:
            raise InvalidParameter("model", "has no LM head; only embeddings are available")
        prompt, embeddings = self._prompt(request)
        prompt, images = self._insert_images(request, prompt)
        check_prompt_length(len(prompt), self._max_model_len)
        if request.lora is not None and not info.lora.enabled:
            raise InvalidParameter("lora_name", LORA_DISABLED)
        bad_words = self._bad_word_sequences(params) if params.bad_words else []
        check_sampling(params, bad_words, max_num_seqs=info.max_num_seqs, vocab_size=info.vocab_size)
        self._check_text_features(request)
        if request.queue_timeout_ms is not None and not request.queue_timeout_ms > 0:
            raise InvalidParameter("queue_timeout_ms", f"must be above 0, got {request.queue_timeout_ms}")
        if (embeddings is not None or images) and params.prompt_logprobs is not None:
            raise InvalidParameter("prompt_logprobs", "not available for a prompt with embeddings or images")
        room = self._max_model_len - len(prompt)
        if params.min_tokens > room:
            raise InvalidParameter(
                "min_tokens", f"{params.min_tokens} tokens do not fit, there is room for {room}"
            )
        max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
        check_scores(
            info.scores,
            params,
            num_prompt_tokens=len(prompt),
            max_tokens=max_tokens,
            vocab_size=info.vocab_size,
        )
        eos_token_ids = () if params.ignore_eos else self._eos_token_ids
        return EngineRequest(
            request_id=request.request_id,
            prompt_token_ids=prompt,
            sampling=params,
            max_tokens=max_tokens,
            end_token_ids=frozenset((*eos_token_ids, *params.stop_token_ids)),
            bad_words=tuple(bad_words),
            priority=request.priority,
            cache_identity=(request.cache_salt,),
            lora=request.lora,
            queue_timeout_ms=request.queue_timeout_ms,
            input_embeddings=embeddings,
            images=images,
            draft=checked_draft(request, info.vocab_size),
            retention=request.retention,
            queue_delay=request.queue_delay,
            trace="" if request.tracer is None else request.tracer.context,
        )

    def process_pooling(self, request: PoolingRequest) -> EngineRequest:
        """Tokenize and check a pooling request. Raises `InvalidParameter` if the model does not support it."""
        params = self._pooling_params(request)
        token_ids, token_types = self._pooling_tokens(request)
        return EngineRequest(
            request_id=request.request_id,
            prompt_token_ids=token_ids,
            sampling=_NO_SAMPLING,
            max_tokens=1,
            priority=request.priority,
            queue_delay=request.queue_delay,
            pooling=params,
            # The identity of generation requests without a salt, so that both share cached prefixes.
            cache_identity=("",),
            token_type_ids=token_types if any(token_types) else [],
        )

    def _prompt(self, request: GenerationRequest) -> tuple[list[int], InputEmbeddings | None]:
        """Return the token ids, and the embeddings that replace some of them."""
        embeddings = None
        if request.prompt_embeds is not None:
            ids, embeddings = embeddings_as_prompt(request, self._info)
        elif request.prompt_embedding_table is not None:
            ids, embeddings = insert_virtual_tokens(request, self._token_ids(request), self._info)
        else:
            ids = self._token_ids(request)
        if not isinstance(request.prompt, str):
            check_tokens("prompt", ids, self._info.vocab_size)
        return ids, embeddings

    def _token_ids(self, request: GenerationRequest) -> list[int]:
        if isinstance(request.prompt, str):
            special = request.add_special_tokens
            return encode_prompt(
                self._tokenizer, request.prompt, self._max_model_len, add_special_tokens=special
            )
        return list(request.prompt)

    def _insert_images(
        self, request: GenerationRequest, ids: list[int]
    ) -> tuple[list[int], list[PromptImage]]:
        """Expand the image tokens of the prompt. Returns the prompt and the decoded images."""
        if self._images is None:
            if request.images:
                raise InvalidParameter("images", "this model takes text only")
            return ids, []
        if request.prompt_embeds is not None or request.prompt_embedding_table is not None:
            if request.images:
                raise InvalidParameter("images", "cannot be given beside other vectors")
            return ids, []
        # Check the length before the images are decoded.
        self._images.check_length(ids, self._max_model_len)
        return self._images.place(request, ids, self._max_model_len, self._tokenizer)

    def _bad_word_sequences(self, params: SamplingParams) -> list[tuple[int, ...]]:
        """Return the token sequences of the bad words.

        Texts are encoded both at the start of a line and after a space.
        """
        given = [word for word in params.bad_words if not isinstance(word, str)]
        words = [word.lstrip() for word in params.bad_words if isinstance(word, str)]
        texts = [form for word in words for form in (word, " " + word)]
        encoded = map(tuple, self._tokenizer.encode_batch(texts, add_special_tokens=False))
        return [ids for ids in dict.fromkeys([*given, *encoded]) if ids]

    def _check_text_features(self, request: GenerationRequest) -> None:
        """Check the features that need a tokenizer."""
        params = request.sampling
        if params.guided_decoding is not None and self._tokenizer.token_bytes(0) is None:
            raise InvalidParameter(
                params.guided_decoding.field, "this model's tokenizer has no bytes for single tokens"
            )
        if params.stop and (not request.detokenize or self._tokenizer is NO_TOKENIZER):
            raise InvalidParameter("stop", "stop strings need detokenization, which is off for this request")

    def _pooling_params(self, request: PoolingRequest) -> PoolingParams:
        params, pooling = request.params, self._info.pooling
        if pooling is None:
            raise InvalidParameter("task", f"runner {self._info.runner} does not support embeddings")
        if params.task not in pooling.tasks:
            raise InvalidParameter("task", f"this model has no classifier: it cannot {params.task}")
        if params.dimensions is not None and params.dimensions > pooling.dimensions:
            raise InvalidParameter(
                "dimensions", f"is {params.dimensions}, embeddings of this model have {pooling.dimensions}"
            )
        # The core uses the pooling kind to decide which logits it needs, so the default is resolved here. The
        # classifier of a decoder reads the last token; that of an encoder has a pooling of its own.
        kind = "last" if params.task == "classify" else params.pooling or pooling.kind
        return msgspec.structs.replace(params, pooling=kind)

    def _pooling_tokens(self, request: PoolingRequest) -> tuple[list[int], list[int]]:
        """Return token ids and token types."""
        # The KV cache of a decoder needs room for one token more than are pooled.
        max_tokens = self._max_model_len - 1 if self._info.num_blocks else self._max_model_len
        limit = request.truncate_prompt_tokens
        if limit == -1:
            limit = max_tokens
        elif limit is not None and not 1 <= limit <= max_tokens:
            raise InvalidParameter(
                "truncate_prompt_tokens", f"must be -1 or between 1 and {max_tokens}, got {limit}"
            )
        prompt = request.prompt
        if isinstance(prompt, list):
            check_tokens("prompt", prompt, self._info.vocab_size)
            token_ids, token_types = prompt[:limit], list[int]()
        else:
            text, second = (prompt, None) if isinstance(prompt, str) else prompt
            token_ids, token_types = self._tokenizer.encode_pair(
                self._start_of(text, max_tokens, truncate=limit is not None),
                None if second is None else self._start_of(second, max_tokens, truncate=limit is not None),
                add_special_tokens=request.add_special_tokens,
                max_tokens=limit,
            )
        if not token_ids:
            raise InvalidParameter("prompt", "is empty")
        if len(token_ids) > max_tokens:
            raise _too_long_to_pool(f"{len(token_ids)}", max_tokens)
        return token_ids, token_types

    def _start_of(self, text: str, max_tokens: int, *, truncate: bool) -> str:
        """Return as much of a text as can be pooled. Raises `InvalidParameter` for a longer text unless `truncate`."""
        start, at_least = cut_text(self._tokenizer, text, max_tokens)
        if at_least and not truncate:
            raise _too_long_to_pool(f"at least {at_least}", max_tokens)
        return start


def _too_long_to_pool(length: str, max_tokens: int) -> InvalidParameter:
    return InvalidParameter("prompt", f"is {length} tokens long; this model takes at most {max_tokens}")

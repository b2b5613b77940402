"""Turns a request for text into one for the engine core."""

from __future__ import annotations

from neso.engine.core.request import EngineRequest, InputEmbeddings, PromptImage
from neso.engine.ipc.messages import EngineInfo
from neso.engine.lora.config import LORA_DISABLED
from neso.engine.open_tokenizer import EngineText
from neso.engine.prompt_vectors import PromptVectors
from neso.engine.sampling.limits import check_sampling, check_tokens
from neso.engine.spec_decode.request_draft import checked_draft
from neso.engine.text.tokenizer import NO_TOKENIZER
from neso.engine.vision.image_prompt import ImagePrompt
from neso.generation import GenerationRequest, InvalidParameter, SamplingParams, check_prompt_length


class InputProcessor:
    """Tokenizes and checks against the limits of one model."""

    def __init__(self, tokenizer: EngineText, info: EngineInfo, images: ImagePrompt | None = None) -> None:
        self._tokenizer = tokenizer
        self._max_model_len = info.max_model_len
        self._info = info
        self._generates = info.generates
        self._images = images
        self._vectors = PromptVectors(info)
        # A configuration may name tokens that the model has no logits for.
        self._eos_token_ids = [token for token in tokenizer.eos_token_ids if 0 <= token < info.vocab_size]

    def process(self, request: GenerationRequest) -> EngineRequest:
        """Raises `InvalidParameter` for what the model cannot do.

        `max_tokens` beyond the model's length is cut to it: such a sequence ends with the reason "length".
        """
        if not self._generates:
            raise InvalidParameter("model", "gives vectors, not text: its checkpoint has no head for tokens")
        prompt, embeddings = self._prompt(request)
        prompt, images = self._place_images(request, prompt)
        check_prompt_length(len(prompt), self._max_model_len)
        params = request.sampling
        if request.lora is not None and not self._info.lora.enabled:
            raise InvalidParameter("lora_name", LORA_DISABLED)
        bad_words = self._bad_word_sequences(params)
        check_sampling(
            params,
            bad_words,
            max_num_seqs=self._info.max_num_seqs,
            vocab_size=self._info.vocab_size,
        )
        if params.guided_decoding is not None and self._tokenizer.token_bytes(0) is None:
            raise InvalidParameter(
                params.guided_decoding.field, "this model's tokenizer has no bytes for single tokens"
            )
        if params.stop and (not request.detokenize or self._tokenizer is NO_TOKENIZER):
            raise InvalidParameter(
                "stop", "is looked for in the text, and none is made of this request's tokens"
            )
        if request.queue_timeout_ms is not None and not request.queue_timeout_ms > 0:
            raise InvalidParameter("queue_timeout_ms", f"must be above 0, got {request.queue_timeout_ms}")
        if (embeddings is not None or images) and params.prompt_logprobs is not None:
            raise InvalidParameter(
                "prompt_logprobs", "a prompt with vectors has tokens without probabilities"
            )
        room = self._max_model_len - len(prompt)
        if params.min_tokens > room:
            raise InvalidParameter(
                "min_tokens", f"{params.min_tokens} tokens do not fit, there is room for {room}"
            )
        max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
        self._info.scores.check(
            params,
            num_prompt_tokens=len(prompt),
            max_tokens=max_tokens,
            vocab_size=self._info.vocab_size,
        )
        return EngineRequest(
            request_id=request.request_id,
            prompt_token_ids=prompt,
            sampling=params,
            max_tokens=max_tokens,
            end_token_ids=self._end_token_ids(params),
            bad_words=tuple(bad_words),
            priority=request.priority,
            cache_identity=(request.cache_salt,),
            lora=request.lora,
            queue_timeout_ms=request.queue_timeout_ms,
            input_embeddings=embeddings,
            images=images,
            draft=checked_draft(request, self._info.vocab_size),
            retention=request.retention,
        )

    def _bad_word_sequences(self, params: SamplingParams) -> list[tuple[int, ...]]:
        """Token sequences of the bad words; texts as encoded at the start of a line and after a space."""
        given = [word for word in params.bad_words if not isinstance(word, str)]
        words = [word.lstrip() for word in params.bad_words if isinstance(word, str)]
        texts = [form for word in words for form in (word, " " + word)]
        encoded = map(tuple, self._tokenizer.encode_batch(texts, add_special_tokens=False))
        return [ids for ids in dict.fromkeys([*given, *encoded]) if ids]

    def _end_token_ids(self, params: SamplingParams) -> frozenset[int]:
        return frozenset((*(() if params.ignore_eos else self._eos_token_ids), *params.stop_token_ids))

    def _prompt(self, request: GenerationRequest) -> tuple[list[int], InputEmbeddings | None]:
        """Token ids, and the vectors that stand in place of some."""
        embeddings = None
        if request.prompt_embeds is not None:
            ids, embeddings = self._vectors.whole_prompt(request)
        elif request.prompt_embedding_table is not None:
            ids, embeddings = self._vectors.with_table(request, self._token_ids(request))
        else:
            ids = self._token_ids(request)
        if not isinstance(request.prompt, str):
            check_tokens("prompt", ids, self._info.vocab_size)
        return ids, embeddings

    def _place_images(
        self, request: GenerationRequest, ids: list[int]
    ) -> tuple[list[int], list[PromptImage]]:
        if self._images is None:
            if request.images:
                raise InvalidParameter("images", "this model takes text only")
            return ids, []
        if request.prompt_embeds is not None or request.prompt_embedding_table is not None:
            if request.images:
                raise InvalidParameter("images", "cannot be given beside other vectors")
            return ids, []
        check_prompt_length(self._images.expanded_length(ids), self._max_model_len)  # before they are decoded
        return self._images.place(request, ids)

    def _token_ids(self, request: GenerationRequest) -> list[int]:
        if isinstance(request.prompt, str):
            return self._tokenizer.encode(request.prompt, add_special_tokens=request.add_special_tokens)
        return list(request.prompt)

"""The three models that a request goes through, and what becomes of its tensors on the way."""

import asyncio
from contextlib import asynccontextmanager
from itertools import islice

import numpy as np
import triton_python_backend_utils as pb_utils

TO_PREPROCESSING = {
    "text_input": "QUERY",
    "decoder_text_input": "DECODER_QUERY",
    "max_tokens": "REQUEST_OUTPUT_LEN",
    "bad_words": "BAD_WORDS_DICT",
    "stop_words": "STOP_WORDS_DICT",
    "embedding_bias_words": "EMBEDDING_BIAS_WORDS",
    "embedding_bias_weights": "EMBEDDING_BIAS_WEIGHTS",
    "end_id": "END_ID",
    "pad_id": "PAD_ID",
    "prompt_table_extra_id": "PROMPT_TABLE_EXTRA_ID",
}
FROM_PREPROCESSING = {
    "INPUT_ID": "input_ids",
    "REQUEST_INPUT_LEN": "input_lengths",
    "REQUEST_OUTPUT_LEN": "request_output_len",
    "DECODER_INPUT_ID": "decoder_input_ids",
    "REQUEST_DECODER_INPUT_LEN": "decoder_input_lengths",
    "BAD_WORDS_IDS": "bad_words_list",
    "STOP_WORDS_IDS": "stop_words_list",
    "EMBEDDING_BIAS": "embedding_bias",
    "OUT_END_ID": "end_id",
    "OUT_PAD_ID": "pad_id",
    "OUT_PROMPT_TABLE_EXTRA_IDS": "prompt_table_extra_ids",
}
RENAMED = {
    "stream": "streaming",
    "top_k": "runtime_top_k",
    "top_p": "runtime_top_p",
    "length_penalty": "len_penalty",
}
"""Inputs that tensorrt_llm knows by another name; those that are in no list have the same name there."""
OWN = {"num_draft_tokens", "use_draft_logits"}


class Chain:
    """Calls the models. Arrays go by the names of tensors and begin with a batch dimension of 1.

    `batches`: whether those of the models do.
    """

    def __init__(self, parameters, batches):
        self.preprocessing = parameters.get("preprocessing_model_name") or "preprocessing"
        self.generation = parameters.get("tensorrt_llm_model_name") or "tensorrt_llm"
        self.draft = parameters.get("tensorrt_llm_draft_model_name") or ""
        self.postprocessing = parameters.get("postprocessing_model_name") or "postprocessing"
        self.batches = batches
        self.to_decode = []  # lists of token ids, and the futures of their texts
        self.decoding = set()

    async def preprocess(self, inputs):
        """What tensorrt_llm is to be given for the inputs of a request."""
        given = {TO_PREPROCESSING[name]: inputs[name] for name in TO_PREPROCESSING.keys() & inputs.keys()}
        response = await self.request(self.preprocessing, given).async_exec()
        made = self.outputs(response)
        prepared = {to: made[name] for name, to in FROM_PREPROCESSING.items() if name in made}
        for name in inputs.keys() - TO_PREPROCESSING.keys() - OWN:
            prepared[RENAMED.get(name, name)] = inputs[name]
        return prepared

    @asynccontextmanager
    async def generation_of(self, prepared, request_id, model=None):
        """The responses of tensorrt_llm, as they come; what is still to come when this is left is cancelled."""
        request = self.request(model or self.generation, prepared, request_id)
        responses = await request.async_exec(decoupled=True)
        try:
            yield self.outputs_of(responses)
        finally:
            responses.cancel()

    async def outputs_of(self, responses):
        async for response in responses:
            outputs = self.outputs(response)
            if outputs:  # the last response may be the end only
                yield outputs

    async def decode(self, sequences):
        """The text of each list of token ids. What several requests ask at the same time is one call."""
        texts = asyncio.get_running_loop().create_future()
        self.to_decode.append((sequences, texts))
        if len(self.to_decode) == 1:
            task = asyncio.create_task(self.decode_all())
            self.decoding.add(task)
            task.add_done_callback(self.decoding.discard)
        return await texts

    async def decode_all(self):
        waiting, self.to_decode = self.to_decode, []
        try:
            await self.decode_together(waiting)
        except Exception:
            for one in waiting:  # what one has must not fail the others
                try:
                    await self.decode_together([one])
                except Exception as error:
                    one[1].done() or one[1].set_exception(error)

    async def decode_together(self, waiting):
        texts = iter(await self.texts_of([ids for sequences, _ in waiting for ids in sequences]))
        for sequences, answer in waiting:
            own = list(islice(texts, len(sequences)))
            answer.done() or answer.set_result(own)  # done: the request was cancelled

    async def texts_of(self, sequences):
        tokens = np.zeros((1, len(sequences), max(map(len, sequences))), np.int32)
        for row, ids in zip(tokens[0], sequences, strict=True):
            row[: len(ids)] = ids
        lengths = np.array([[len(ids) for ids in sequences]], np.int32)
        inputs = {"TOKENS_BATCH": tokens, "SEQUENCE_LENGTH": lengths}
        response = await self.request(self.postprocessing, inputs).async_exec()
        return [text.decode(errors="replace") for text in arrays(response)["OUTPUT"].flat]

    def request(self, model, inputs, request_id=""):
        tensors = [
            pb_utils.Tensor(name, array if self.batches else array[0]) for name, array in inputs.items()
        ]
        return pb_utils.InferenceRequest(model_name=model, inputs=tensors, request_id=request_id)

    def outputs(self, response):
        return {name: array if self.batches else array[None] for name, array in arrays(response).items()}


def flag(inputs, name):
    return name in inputs and bool(inputs[name].any())


def prompt_of(prepared):
    """The tokens of the one prompt in what tensorrt_llm is to be given."""
    length = int(prepared["input_lengths"].flat[0])
    return prepared["input_ids"][0, :length].tolist()


def arrays(response):
    """Raises the error of a response as what a model raises."""
    if response.has_error():
        raise RequestError(response.error())
    return {tensor.name(): tensor.as_numpy() for tensor in response.output_tensors()}


class RequestError(Exception):
    """The `TritonError` that the client is to get."""

    def __init__(self, error):
        super().__init__(error.message())
        self.error = error

    @classmethod
    def invalid(cls, message):
        return cls(pb_utils.TritonError(message, pb_utils.TritonError.INVALID_ARG))

"""BLS calls to preprocessing, tensorrt_llm and postprocessing, and the mapping of tensors between them."""

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
# Inputs with a different name in tensorrt_llm. All other inputs keep their names.
RENAMED = {
    "stream": "streaming",
    "top_k": "runtime_top_k",
    "top_p": "runtime_top_p",
    "length_penalty": "len_penalty",
}
BLS_ONLY = {"num_draft_tokens", "use_draft_logits"}


class Pipeline:
    """Calls the models of the layout. Arrays are keyed by tensor name and have a batch dimension of 1.

    `has_batch_dim`: whether the called models have a batch dimension.
    """

    def __init__(self, parameters, has_batch_dim):
        self.preprocessing = parameters.get("preprocessing_model_name") or "preprocessing"
        self.generation = parameters.get("tensorrt_llm_model_name") or "tensorrt_llm"
        self.draft = parameters.get("tensorrt_llm_draft_model_name") or ""
        self.postprocessing = parameters.get("postprocessing_model_name") or "postprocessing"
        self.has_batch_dim = has_batch_dim
        self.pending_decodes = []  # (token id lists, future of their texts)
        self.decode_tasks = set()

    async def preprocess(self, inputs):
        """Convert the inputs of a request to inputs of tensorrt_llm."""
        text_inputs = {
            TO_PREPROCESSING[name]: inputs[name] for name in TO_PREPROCESSING.keys() & inputs.keys()
        }
        response = await self.make_request(self.preprocessing, text_inputs).async_exec()
        outputs = self.read_outputs(response)
        prepared = {name: outputs[source] for source, name in FROM_PREPROCESSING.items() if source in outputs}
        for name in inputs.keys() - TO_PREPROCESSING.keys() - BLS_ONLY:
            prepared[RENAMED.get(name, name)] = inputs[name]
        return prepared

    @asynccontextmanager
    async def generate(self, prepared, request_id, model=None, parameters=None):
        """Context of an async iterator over the outputs of tensorrt_llm. Leaving it cancels the generation."""
        request = self.make_request(model or self.generation, prepared, request_id, parameters)
        responses = await request.async_exec(decoupled=True)
        try:
            yield self.iterate_outputs(responses)
        finally:
            responses.cancel()

    async def iterate_outputs(self, responses):
        async for response in responses:
            outputs = self.read_outputs(response)
            if outputs:  # the final response may be empty
                yield outputs

    async def decode(self, sequences):
        """Decode lists of token ids to texts. Concurrent calls are batched into one request."""
        texts = asyncio.get_running_loop().create_future()
        self.pending_decodes.append((sequences, texts))
        if len(self.pending_decodes) == 1:
            task = asyncio.create_task(self.decode_pending())
            self.decode_tasks.add(task)
            task.add_done_callback(self.decode_tasks.discard)
        return await texts

    async def decode_pending(self):
        pending, self.pending_decodes = self.pending_decodes, []
        try:
            await self.decode_batch(pending)
        except Exception:
            # Isolate failures: one call's error must not fail the others.
            for call in pending:
                try:
                    await self.decode_batch([call])
                except Exception as error:
                    if not call[1].done():
                        call[1].set_exception(error)

    async def decode_batch(self, pending):
        sequences = [ids for call_sequences, _ in pending for ids in call_sequences]
        texts = iter(await self.postprocess(sequences))
        for call_sequences, future in pending:
            call_texts = list(islice(texts, len(call_sequences)))
            if not future.done():  # a future is done if its request was cancelled
                future.set_result(call_texts)

    async def postprocess(self, sequences):
        tokens = np.zeros((1, len(sequences), max(map(len, sequences))), np.int32)
        for row, ids in zip(tokens[0], sequences, strict=True):
            row[: len(ids)] = ids
        lengths = np.array([[len(ids) for ids in sequences]], np.int32)
        inputs = {"TOKENS_BATCH": tokens, "SEQUENCE_LENGTH": lengths}
        response = await self.make_request(self.postprocessing, inputs).async_exec()
        return [text.decode(errors="replace") for text in read_arrays(response)["OUTPUT"].flat]

    def make_request(self, model, inputs, request_id="", parameters=None):
        tensors = [
            pb_utils.Tensor(name, array if self.has_batch_dim else array[0]) for name, array in inputs.items()
        ]
        return pb_utils.InferenceRequest(
            model_name=model,
            inputs=tensors,
            requested_output_names=[],  # all
            request_id=request_id,
            parameters=parameters,
        )

    def read_outputs(self, response):
        arrays = read_arrays(response)
        return arrays if self.has_batch_dim else {name: array[None] for name, array in arrays.items()}


def read_flag(inputs, name):
    return name in inputs and bool(inputs[name].any())


def read_prompt(prepared):
    """Return the token ids of the prompt from the inputs of tensorrt_llm."""
    length = int(prepared["input_lengths"].flat[0])
    return prepared["input_ids"][0, :length].tolist()


def read_arrays(response):
    """Return the output arrays by name. Raises `RequestError` if the response is an error."""
    if response.has_error():
        raise RequestError(response.error())
    return {tensor.name(): tensor.as_numpy() for tensor in response.output_tensors()}


class RequestError(Exception):
    """Fails the request with `error`, a `TritonError`."""

    def __init__(self, error):
        super().__init__(error.message())
        self.error = error

    @classmethod
    def invalid(cls, message):
        return cls(pb_utils.TritonError(message, pb_utils.TritonError.INVALID_ARG))

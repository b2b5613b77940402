"""Triton Python model: text to text, with BLS calls to preprocessing, tensorrt_llm and postprocessing.

Differences from the ensemble: stop words match anywhere in the text, and a draft model can be used for speculative
decoding (`num_draft_tokens`). One instance processes any number of requests concurrently.
"""

import asyncio
import json
from contextlib import aclosing

import numpy as np
import triton_python_backend_utils as pb_utils

from pipeline import Pipeline, RequestError, read_flag, read_prompt
from speculative import generate_with_draft
from text_output import TextOutput

PASS_THROUGH = (
    *("cum_log_probs", "output_log_probs", "context_logits", "generation_logits", "batch_index"),
    *("sequence_index", "kv_cache_alloc_new_blocks", "kv_cache_reused_blocks", "kv_cache_alloc_total_blocks"),
    *("arrival_time_ns", "first_scheduled_time_ns", "first_token_time_ns", "last_token_time_ns"),
    *("acceptance_rate", "total_accepted_draft_tokens", "total_draft_tokens"),
    *("num_input_tokens", "num_output_tokens"),
)
CANCELLATION_CHECK_SECONDS = 0.1
TRUE = ("true", "1", "yes", "t")


class TritonPythonModel:
    def initialize(self, args):
        config = json.loads(args["model_config"])
        parameters = {name: value["string_value"] for name, value in config["parameters"].items()}
        self.decoupled = pb_utils.using_decoupled_model_transaction_policy(config)
        self.has_batch_dim = config["max_batch_size"] > 0
        self.accumulate_tokens = parameters.get("accumulate_tokens", "").lower() in TRUE
        self.pipeline = Pipeline(parameters, self.has_batch_dim)
        self.running = {}  # request by task
        self.cancellation_task = None

    async def execute(self, requests):
        """Start a task per request and return; responses are sent by the tasks."""
        for request in requests:
            task = asyncio.create_task(self.process(request))
            self.running[task] = request
            task.add_done_callback(self.running.pop)
        if self.cancellation_task is None or self.cancellation_task.done():
            self.cancellation_task = asyncio.create_task(self.watch_cancellation())
        return None if self.decoupled else [None] * len(requests)

    async def watch_cancellation(self):
        while self.running:
            for task, request in tuple(self.running.items()):
                if request.is_cancelled():
                    task.cancel()
            await asyncio.sleep(CANCELLATION_CHECK_SECONDS)

    async def process(self, request):
        sender = request.get_response_sender()
        try:
            async with aclosing(self.generate(request)) as responses:
                if self.decoupled:
                    async for outputs in responses:
                        sender.send(make_response(outputs))
                else:
                    sender.send(make_response(join_responses([outputs async for outputs in responses])))
            error = None
        except RequestError as failure:
            error = failure.error
        except asyncio.CancelledError:
            error = pb_utils.TritonError("the request was cancelled", pb_utils.TritonError.CANCELLED)
        except Exception as failure:
            pb_utils.Logger.log_error(f"tensorrt_llm_bls: {failure!r}")
            error = pb_utils.TritonError(f"tensorrt_llm_bls: {failure!r}")
        response = None if error is None else pb_utils.InferenceResponse(error=error)
        sender.send(response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    async def generate(self, request):
        """Yield the outputs of each response, as arrays by name."""
        inputs = {tensor.name(): self.add_batch_dim(tensor.as_numpy()) for tensor in request.inputs()}
        if read_flag(inputs, "stream") and not self.decoupled:
            raise RequestError.invalid("stream: needs model_transaction_policy { decoupled: true }")
        batch_size = len(inputs["text_input"])
        if not batch_size:
            raise RequestError.invalid("text_input: has no rows")
        rows = [{name: array[i : i + 1] for name, array in inputs.items()} for i in range(batch_size)]
        if batch_size == 1:
            responses = self.generate_row(rows[0], request, {})
        else:
            responses = merge(
                [
                    self.generate_row(row, request, {"batch_index": np.array([[i]], np.int32)})
                    for i, row in enumerate(rows)
                ]
            )
        async with aclosing(responses):
            async for outputs in responses:
                yield outputs

    async def generate_row(self, inputs, request, extra_outputs):
        """Like `generate`, for one text: all arrays have batch dimension 1. `extra_outputs`: added to each response."""
        request_id = request.request_id()
        prepared = await self.pipeline.preprocess(inputs)
        text_output = self.make_text_output(inputs, prepared)
        if read_flag(inputs, "num_draft_tokens"):
            outputs = await generate_with_draft(self.pipeline, inputs, prepared, request_id)
            texts = await text_output.add(0, read_token_ids(outputs))
            yield self.make_outputs(texts, outputs, extra_outputs)
            return
        # tensorrt_llm uses parameters with the names of its inputs, and warns about others.
        parameters = json.loads(request.parameters())
        async with self.pipeline.generate(prepared, request_id, parameters=parameters) as responses:
            async for outputs in responses:
                index = read_index(outputs, "sequence_index")
                texts = await text_output.add(index, read_token_ids(outputs))
                if texts is not None:
                    yield self.make_outputs(texts, outputs, extra_outputs)
                if text_output.all_stopped:
                    return
        for index, texts in (await text_output.finish()).items():
            outputs = (
                {"sequence_index": np.array([[index]], np.int32)} if len(text_output.streams) > 1 else {}
            )
            yield self.make_outputs(texts, outputs, extra_outputs)

    def make_text_output(self, inputs, prepared):
        stop_words = inputs["stop_words"].flat if "stop_words" in inputs else ()
        num_sequences = inputs.get("num_return_sequences", np.array(1))
        return TextOutput(
            self.pipeline.decode,
            read_prompt(prepared),
            [word.decode() for word in stop_words if word],
            streaming=read_flag(inputs, "stream"),
            accumulate=self.accumulate_tokens,
            num_sequences=int(num_sequences.flat[0]),
        )

    def make_outputs(self, texts, outputs, extra_outputs):
        passed = {name: outputs[name] for name in PASS_THROUGH if name in outputs} | extra_outputs
        if not self.has_batch_dim:
            passed = {name: array[0] for name, array in passed.items()}
        return {"text_output": np.array([text.encode() for text in texts], np.object_), **passed}

    def add_batch_dim(self, array):
        """Add a batch dimension. Also restores the dimension of inputs with `reshape { shape: [ ] }`."""
        if not self.has_batch_dim:
            array = array[None]
        return array[:, None] if array.ndim == 1 else array


def read_token_ids(outputs):
    """Return the token ids of each sequence in a response of tensorrt_llm."""
    lengths = outputs["sequence_length"].flat
    return [ids[:length].tolist() for ids, length in zip(outputs["output_ids"][0], lengths, strict=True)]


def read_index(outputs, name):
    return int(outputs[name].flat[0]) if name in outputs else 0


def make_response(outputs):
    return pb_utils.InferenceResponse([pb_utils.Tensor(name, array) for name, array in outputs.items()])


async def merge(iterators):
    """Yield the items of several async iterators as they arrive. An error in one iterator closes all."""
    queue = asyncio.Queue()

    async def drain(iterator):
        try:
            async for item in iterator:
                queue.put_nowait((item, None))
        except BaseException as error:
            queue.put_nowait((None, error))
            raise
        queue.put_nowait((None, None))

    tasks = [asyncio.create_task(drain(iterator)) for iterator in iterators]
    try:
        num_running = len(tasks)
        while num_running:
            item, error = await queue.get()
            if error is not None:
                raise error
            if item is None:
                num_running -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for iterator in iterators:
            await iterator.aclose()


def join_responses(responses):
    """Concatenate responses into one response, ordered by batch index and sequence index."""
    responses = sorted(
        responses,
        key=lambda outputs: (read_index(outputs, "batch_index"), read_index(outputs, "sequence_index")),
    )
    if len(responses) == 1:
        return responses[0]
    names = dict.fromkeys(name for outputs in responses for name in outputs)
    return {
        name: concatenate_padded([outputs[name] for outputs in responses if name in outputs])
        for name in names
    }


def concatenate_padded(arrays):
    """Concatenate along the first dimension; other dimensions are padded with zeros to the largest."""
    if arrays[0].ndim == 1:
        return np.concatenate(arrays)
    shape = np.max([array.shape[1:] for array in arrays], axis=0)
    padded = []
    for array in arrays:
        missing = [(0, size - own) for size, own in zip(shape, array.shape[1:], strict=True)]
        padded.append(np.pad(array, [(0, 0), *missing]))
    return np.concatenate(padded)

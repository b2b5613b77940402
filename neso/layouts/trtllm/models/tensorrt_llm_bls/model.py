"""Text in, text out: preprocessing, tensorrt_llm and postprocessing as one model.

Beside what the ensemble does, a stop word counts wherever it is in the text, and a draft model may guess for
tensorrt_llm (`num_draft_tokens`). One instance has any number of requests under way.
"""

import asyncio
import json
from contextlib import aclosing

import numpy as np
import triton_python_backend_utils as pb_utils

from chain import Chain, RequestError, flag, prompt_of
from merged import index_of, joined, merged
from speculative import speculate
from texts import Texts

PASSED_ON = (
    *("cum_log_probs", "output_log_probs", "context_logits", "generation_logits", "batch_index"),
    *("sequence_index", "kv_cache_alloc_new_blocks", "kv_cache_reused_blocks", "kv_cache_alloc_total_blocks"),
    *("arrival_time_ns", "first_scheduled_time_ns", "first_token_time_ns", "last_token_time_ns"),
    *("acceptance_rate", "total_accepted_draft_tokens", "total_draft_tokens"),
    *("num_input_tokens", "num_output_tokens"),
)
CANCELLATION_CHECK_SECONDS = 0.1


class TritonPythonModel:
    def initialize(self, args):
        config = json.loads(args["model_config"])
        parameters = {name: value["string_value"] for name, value in config["parameters"].items()}
        self.decoupled = pb_utils.using_decoupled_model_transaction_policy(config)
        self.batches = config["max_batch_size"] > 0
        self.accumulates = parameters.get("accumulate_tokens", "").lower() in ("true", "1", "yes", "t")
        self.chain = Chain(parameters, self.batches)
        self.under_way = {}
        self.watcher = None

    async def execute(self, requests):
        """Requests are answered later, by their senders: none waits for another."""
        for request in requests:
            task = asyncio.create_task(self.respond(request))
            self.under_way[task] = request
            task.add_done_callback(self.under_way.pop)
        if self.watcher is None or self.watcher.done():
            self.watcher = asyncio.create_task(self.cancel_with_clients())
        return None if self.decoupled else [None] * len(requests)

    async def cancel_with_clients(self):
        while self.under_way:
            for task, request in tuple(self.under_way.items()):
                if request.is_cancelled():
                    task.cancel()
            await asyncio.sleep(CANCELLATION_CHECK_SECONDS)

    async def respond(self, request):
        sender = request.get_response_sender()
        try:
            async with aclosing(self.generate(request)) as responses:
                if self.decoupled:
                    async for outputs in responses:
                        sender.send(response_of(outputs))
                else:
                    sender.send(response_of(joined([outputs async for outputs in responses])))
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
        """The outputs of each response to a request."""
        inputs = {tensor.name(): self.with_batch(tensor.as_numpy()) for tensor in request.inputs()}
        if flag(inputs, "stream") and not self.decoupled:
            raise RequestError.invalid("stream: needs model_transaction_policy { decoupled: true }")
        count = len(inputs["text_input"])
        if not count:
            raise RequestError.invalid("text_input: has no rows")
        rows = [{name: array[i : i + 1] for name, array in inputs.items()} for i in range(count)]
        if count == 1:
            responses = self.generate_row(rows[0], request.request_id(), {})
        else:
            responses = merged(
                [
                    self.generate_row(row, request.request_id(), {"batch_index": np.array([[i]], np.int32)})
                    for i, row in enumerate(rows)
                ]
            )
        async with aclosing(responses):
            async for outputs in responses:
                yield outputs

    async def generate_row(self, inputs, request_id, marks):
        """The same for one text. All arrays have a batch dimension of 1; `marks` are outputs of all responses."""
        prepared = await self.chain.preprocess(inputs)
        texts = self.texts(inputs, prepared)
        if flag(inputs, "num_draft_tokens"):
            outputs = await speculate(self.chain, inputs, prepared, request_id)
            yield self.outputs(await texts.of(0, token_ids(outputs)), outputs, marks)
            return
        async with self.chain.generation_of(prepared, request_id) as responses:
            async for outputs in responses:
                index = index_of(outputs, "sequence_index")
                shown = await texts.of(index, token_ids(outputs))
                if shown is not None:
                    yield self.outputs(shown, outputs, marks)
                if texts.stopped:
                    return
        for index, shown in (await texts.finish()).items():
            several = {"sequence_index": np.array([[index]], np.int32)} if len(texts.growing) > 1 else {}
            yield self.outputs(shown, several, marks)

    def texts(self, inputs, prepared):
        words = inputs["stop_words"].flat if "stop_words" in inputs else ()
        return Texts(
            self.chain.decode,
            prompt_of(prepared),
            [word.decode() for word in words if word],
            streams=flag(inputs, "stream"),
            accumulates=self.accumulates,
            num_sequences=int(inputs["num_return_sequences"].flat[0])
            if "num_return_sequences" in inputs
            else 1,
        )

    def outputs(self, shown, outputs, marks):
        texts = np.array([text.encode() for text in shown], np.object_)
        passed = {name: outputs[name] for name in PASSED_ON if name in outputs}
        passed |= marks
        if not self.batches:
            passed = {name: array[0] for name, array in passed.items()}
        return {"text_output": texts, **passed}

    def with_batch(self, array):
        """Inputs that the configuration reshapes to nothing get their dimension back."""
        if not self.batches:
            array = array[None]
        return array[:, None] if array.ndim == 1 else array


def token_ids(outputs):
    """The tokens of each sequence of a response."""
    lengths = outputs["sequence_length"].flat
    return [ids[:length].tolist() for ids, length in zip(outputs["output_ids"][0], lengths, strict=True)]


def response_of(outputs):
    return pb_utils.InferenceResponse([pb_utils.Tensor(*output) for output in outputs.items()])

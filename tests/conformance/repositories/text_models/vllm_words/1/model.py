import json
import time

import numpy as np
import triton_python_backend_utils as pb_utils

END = 8


class TritonPythonModel:
    """Generates " w0 w1 …", one word per token, up to 8 words or the length limit.

    The prompt "show" returns the input tensors; a prompt that starts with "slowly" adds delays.
    """

    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            inputs = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
            responses = list(self.pieces(inputs))
            if not inputs["stream"][0]:
                responses = [joined(responses)]
            for response in responses:
                if request.is_cancelled():
                    error = pb_utils.TritonError("nobody listens", pb_utils.TritonError.CANCELLED)
                    sender.send(pb_utils.InferenceResponse(error=error))
                    break
                if inputs["text_input"][0].startswith(b"slowly"):
                    time.sleep(0.1)
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor(*pair) for pair in response.items()]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def pieces(self, inputs):
        prompt = inputs["text_input"][0].decode()
        sampling = json.loads(inputs["sampling_parameters"][0])
        words = [f" w{i}" for i in range(END)]
        if prompt == "show":
            reported = {name: value.tolist() for name, value in inputs.items() if value.dtype != object}
            words = [json.dumps({"sampling": sampling, **reported})]
        limit = sampling.get("max_tokens", 16)
        for i, word in enumerate(words[:limit]):
            last = i == len(words) - 1
            reason = "stop" if last else "length" if i + 1 == limit else "None"
            yield {
                "text_output": strings(word),
                "finish_reason": strings(reason),
                "logprobs": strings(json.dumps([logprob(i, word, sampling.get("logprobs") or 0)])),
                "num_input_tokens": np.array([len(prompt.split())], np.uint32),
                "num_output_tokens": np.array([1], np.uint32),
            }


def logprob(i, word, top):
    entry = {str(100 + i): {"logprob": -1.5, "rank": 2, "decoded_token": word}}
    others = {
        str(200 + j): {"logprob": -1.0 - j, "rank": j + 1, "decoded_token": f" o{j}"} for j in range(top)
    }
    return entry | others


def joined(responses):
    whole = dict(responses[-1])
    whole["text_output"] = np.array([b"".join(r["text_output"][0] for r in responses)], np.object_)
    logprobs = [json.loads(r["logprobs"][0])[0] for r in responses]
    whole["logprobs"] = strings(json.dumps(logprobs))
    whole["num_output_tokens"] = np.array([len(responses)], np.uint32)
    return whole


def strings(text):
    return np.array([text.encode()], np.object_)

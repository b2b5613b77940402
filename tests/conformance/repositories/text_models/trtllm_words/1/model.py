import json
import time

import numpy as np
import triton_python_backend_utils as pb_utils

END = 8


class TritonPythonModel:
    """Generates " w0 w1 …", one word per token, up to 8 words or the length limit; ends after a stop word.

    The prompt "show" returns the input tensors; a prompt that starts with "slowly" adds delays.
    """

    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            inputs = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
            words = self.words(inputs)
            if not inputs.get("stream", np.array([[False]]))[0, 0]:
                words = ["".join(words)] if words else [""]
            for word in words:
                if request.is_cancelled():
                    error = pb_utils.TritonError("nobody listens", pb_utils.TritonError.CANCELLED)
                    sender.send(pb_utils.InferenceResponse(error=error))
                    break
                if inputs["text_input"][0, 0].startswith(b"slowly"):
                    time.sleep(0.1)
                sender.send(self.response(inputs, word))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def words(self, inputs):
        if inputs["text_input"][0, 0] == b"show":
            reported = {name: value.tolist() for name, value in inputs.items()}
            return [json.dumps(reported, default=bytes.decode)]
        stop = {word.decode() for word in inputs.get("stop_words", np.empty((1, 0)))[0]}
        words = [f" w{i}" for i in range(min(END, inputs["max_tokens"][0, 0]))]
        ends = [i for i, word in enumerate(words) if any(text in word for text in stop)]
        return words[: ends[0] + 1] if ends else words

    def response(self, inputs, word):
        prompt = inputs["text_input"][0, 0].decode()
        return pb_utils.InferenceResponse(
            [
                pb_utils.Tensor("text_output", np.array([[word.encode()]], np.object_)),
                pb_utils.Tensor("num_input_tokens", np.array([[len(prompt.split())]], np.int32)),
                pb_utils.Tensor("num_output_tokens", np.array([[word.count("w")]], np.int32)),
            ]
        )

import json

import numpy as np
import triton_python_backend_utils as pb_utils
from transformers import AutoTokenizer


class TritonPythonModel:
    def initialize(self, args):
        parameters = json.loads(args["model_config"])["parameters"]
        self.tokenizer = AutoTokenizer.from_pretrained(parameters["tokenizer_dir"]["string_value"])

    def execute(self, requests):
        responses = []
        for request in requests:
            tokens = pb_utils.get_input_tensor_by_name(request, "TOKENS_BATCH").as_numpy()
            lengths = pb_utils.get_input_tensor_by_name(request, "SEQUENCE_LENGTH").as_numpy()
            log_probs = pb_utils.get_input_tensor_by_name(request, "CUM_LOG_PROBS")
            texts = [
                self.tokenizer.decode(beam[: lengths[row][i]], skip_special_tokens=True).encode()
                for row, beams in enumerate(tokens)
                for i, beam in enumerate(beams)
            ]
            zeros = np.array([[0.0]], np.float32)
            log_probs = zeros if log_probs is None else log_probs.as_numpy()
            tensors = [
                pb_utils.Tensor("OUTPUT", np.array(texts).astype(np.object_)),
                pb_utils.Tensor("OUT_CUM_LOG_PROBS", log_probs),
            ]
            responses.append(pb_utils.InferenceResponse(output_tensors=tensors))
        return responses

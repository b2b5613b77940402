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
            query = pb_utils.get_input_tensor_by_name(request, "QUERY").as_numpy()
            length = pb_utils.get_input_tensor_by_name(request, "REQUEST_OUTPUT_LEN").as_numpy()
            ids = [self.tokenizer.encode(row[0].decode()) for row in query]
            outputs = {
                "INPUT_ID": np.array(ids, np.int32),
                "REQUEST_INPUT_LEN": np.array([[len(row)] for row in ids], np.int32),
                "REQUEST_OUTPUT_LEN": length,
                "BAD_WORDS_IDS": self.words(request, "BAD_WORDS_DICT"),
                "STOP_WORDS_IDS": self.words(request, "STOP_WORDS_DICT"),
            }
            tensors = [pb_utils.Tensor(name, array) for name, array in outputs.items()]
            responses.append(pb_utils.InferenceResponse(output_tensors=tensors))
        return responses

    def words(self, request, name):
        tensor = pb_utils.get_input_tensor_by_name(request, name)
        words = [] if tensor is None else [word.decode() for word in tensor.as_numpy()[0]]
        ids = [self.tokenizer.encode(word, add_special_tokens=False) for word in words if word]
        flat = [token for word in ids for token in word] or [0]
        offsets = np.cumsum([len(word) for word in ids]).astype(int).tolist()
        return np.array([[flat, offsets + [-1] * (len(flat) - len(offsets))]], np.int32)

"""From token ids to text."""

import json

import numpy as np
import triton_python_backend_utils as pb_utils

from neso import load_tokenizer

PASSED_ON = ("CUM_LOG_PROBS", "OUTPUT_LOG_PROBS", "CONTEXT_LOGITS", "GENERATION_LOGITS")
YES, NO = ("true", "1", "yes", "t", "y"), ("false", "0", "no", "f", "n")


class TritonPythonModel:
    def initialize(self, args):
        config = json.loads(args["model_config"])
        parameters = {name: value["string_value"] for name, value in config["parameters"].items()}
        self.batches = config["max_batch_size"] > 0
        self.tokenizer = load_tokenizer(parameters["tokenizer_dir"])
        self.skip_special_tokens = parameters.get("skip_special_tokens", "").lower() not in NO
        self.excludes_input = parameters.get("exclude_input_in_output", "").lower() in YES

    def execute(self, requests):
        return [self.respond(request) for request in requests]

    def respond(self, request):
        """OUTPUT has one text a sequence, those of all rows one after the other."""
        inputs = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
        tokens = inputs["TOKENS_BATCH"]
        lengths = inputs["SEQUENCE_LENGTH"].reshape(-1).tolist()
        continues = self.continues(inputs)
        texts = np.empty(len(lengths), np.object_)
        for i, (ids, length) in enumerate(zip(tokens.reshape(len(lengths), -1), lengths, strict=True)):
            texts[i] = self.tokenizer.decode(
                ids[:length].tolist(), skip_special_tokens=self.skip_special_tokens, continues=continues
            ).encode()
        outputs = [pb_utils.Tensor("OUTPUT", texts)]
        outputs += [pb_utils.Tensor(f"OUT_{name}", inputs[name]) for name in PASSED_ON if name in inputs]
        return pb_utils.InferenceResponse(outputs)

    def continues(self, inputs):
        """Whether the tokens go on from others: a space before their first word belongs to the text then."""
        streaming, excluded = inputs.get("STREAMING"), inputs.get("EXCLUDE_INPUT_IN_OUTPUT")
        if streaming is not None and streaming.any():
            return True
        return self.excludes_input if excluded is None else bool(excluded.any())

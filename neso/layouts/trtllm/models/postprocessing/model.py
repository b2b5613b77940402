"""From token ids to text."""

import json
import math

import numpy as np
import triton_python_backend_utils as pb_utils

from neso import load_tokenizer

PASSED_ON = ("CUM_LOG_PROBS", "OUTPUT_LOG_PROBS", "CONTEXT_LOGITS", "GENERATION_LOGITS")
FALSE = ("false", "0", "no", "f", "n")


class TritonPythonModel:
    def initialize(self, args):
        config = json.loads(args["model_config"])
        parameters = {name: value["string_value"] for name, value in config["parameters"].items()}
        self.batches = config["max_batch_size"] > 0
        self.tokenizer = load_tokenizer(parameters["tokenizer_dir"])
        self.skip_special_tokens = parameters.get("skip_special_tokens", "").lower() not in FALSE

    def execute(self, requests):
        return [self.respond(request) for request in requests]

    def respond(self, request):
        inputs = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
        try:
            outputs = [pb_utils.Tensor("OUTPUT", self.texts(inputs))]
        except ValueError as error:
            return pb_utils.InferenceResponse(
                error=pb_utils.TritonError(f"postprocessing: {error}", pb_utils.TritonError.INVALID_ARG)
            )
        outputs += [pb_utils.Tensor(f"OUT_{name}", inputs[name]) for name in PASSED_ON if name in inputs]
        return pb_utils.InferenceResponse(outputs)

    def texts(self, inputs):
        """One text a sequence, those of all rows one after the other."""
        lengths = inputs["SEQUENCE_LENGTH"].reshape(-1).tolist()
        tokens = inputs["TOKENS_BATCH"]
        tokens = tokens.reshape(math.prod(tokens.shape[:-1]), tokens.shape[-1])  # of no tokens, too
        if len(lengths) != len(tokens):
            raise ValueError(
                f"SEQUENCE_LENGTH: has {len(lengths)} values, TOKENS_BATCH {len(tokens)} sequences"
            )
        texts = np.empty(len(lengths), np.object_)
        preceding = inputs.get("PRECEDING_IDS")
        for i, length in enumerate(lengths):
            ids = tokens[i, :length].tolist()
            if preceding is None:
                text = self.tokenizer.decode(ids, skip_special_tokens=self.skip_special_tokens)
            else:
                row = preceding[i * len(preceding) // len(lengths)] if self.batches else preceding
                text = self.continuation(row.tolist(), ids)
            texts[i] = text.encode()
        return texts

    def continuation(self, preceding, ids):
        """What tokens add to the text of those before them: with the space before their first word.

        A character that is not complete is left to the tokens that complete it: it begins in what precedes them.
        """
        detokenizer = self.tokenizer.detokenizer(
            skip_special_tokens=self.skip_special_tokens, prompt_token_ids=preceding
        )
        return detokenizer.add(ids)

"""Triton Python model: token ids to text."""

import json
import math

import numpy as np
import triton_python_backend_utils as pb_utils

from neso import load_tokenizer

PASS_THROUGH = ("CUM_LOG_PROBS", "OUTPUT_LOG_PROBS", "CONTEXT_LOGITS", "GENERATION_LOGITS")
FALSE = ("false", "0", "no", "f", "n")
TOKENIZER_TYPES = ("auto", "llama")


class TritonPythonModel:
    def initialize(self, args):
        config = json.loads(args["model_config"])
        parameters = {name: value["string_value"] for name, value in config["parameters"].items()}
        self.has_batch_dim = config["max_batch_size"] > 0
        check_tokenizer_type(parameters.get("tokenizer_type", ""))
        self.tokenizer = load_tokenizer(parameters["tokenizer_dir"])
        self.skip_special_tokens = parameters.get("skip_special_tokens", "").lower() not in FALSE

    def execute(self, requests):
        return [self.process(request) for request in requests]

    def process(self, request):
        inputs = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
        try:
            outputs = [pb_utils.Tensor("OUTPUT", self.decode(inputs))]
        except ValueError as error:
            return pb_utils.InferenceResponse(
                error=pb_utils.TritonError(f"postprocessing: {error}", pb_utils.TritonError.INVALID_ARG)
            )
        outputs += [pb_utils.Tensor(f"OUT_{name}", inputs[name]) for name in PASS_THROUGH if name in inputs]
        return pb_utils.InferenceResponse(outputs)

    def decode(self, inputs):
        """Decode all sequences: bytes[batch size * sequences per row]."""
        lengths = inputs["SEQUENCE_LENGTH"].reshape(-1).tolist()
        tokens = inputs["TOKENS_BATCH"]
        # Not reshape(-1, n): n may be 0.
        tokens = tokens.reshape(math.prod(tokens.shape[:-1]), tokens.shape[-1])
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
                row = preceding[i * len(preceding) // len(lengths)] if self.has_batch_dim else preceding
                text = self.decode_continuation(row.tolist(), ids)
            texts[i] = text.encode()
        return texts

    def decode_continuation(self, preceding_ids, ids):
        """Decode a chunk of a stream, given the preceding tokens, to keep the space before its first word.

        An incomplete UTF-8 character at the end is omitted; the chunk that completes it contains the character.
        """
        detokenizer = self.tokenizer.detokenizer(
            skip_special_tokens=self.skip_special_tokens, prompt_token_ids=preceding_ids
        )
        return detokenizer.add(ids)


def check_tokenizer_type(name):
    if name and not name.startswith("${") and name not in TOKENIZER_TYPES:
        raise ValueError(f"tokenizer_type: is '{name}', expected one of {', '.join(TOKENIZER_TYPES)}")

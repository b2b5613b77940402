"""Triton Python model: text to the inputs of tensorrt_llm (token ids, word lists, logit biases)."""

import json

import numpy as np
import triton_python_backend_utils as pb_utils

from neso import load_tokenizer
from neso.engine.weights.hub import TOKENIZER_FILES, ModelNotFound, resolve_model
from neso.generation import cut_text
from neso.generation.sampling_params import MAX_WORD_LENGTH

# Texts beyond this multiple of the model's positions are rejected before they are tokenized as a whole. The exact limit
# is checked by tensorrt_llm, which can have a larger context than its checkpoint.
MAX_CONTEXTS = 8
FALSE = ("false", "0", "no")
TOKENIZER_TYPES = ("auto", "llama")


class TritonPythonModel:
    def initialize(self, args):
        config = json.loads(args["model_config"])
        parameters = {name: value["string_value"] for name, value in config["parameters"].items()}
        self.has_batch_dim = config["max_batch_size"] > 0
        check_tokenizer_type(parameters.get("tokenizer_type", ""))
        self.tokenizer = load_tokenizer(parameters["tokenizer_dir"])
        self.add_special_tokens = parameters.get("add_special_tokens", "").lower() not in FALSE
        eos_ids = self.tokenizer.eos_token_ids
        self.end_id = eos_ids[0] if eos_ids else -1
        pad_id = self.tokenizer.pad_token_id
        self.pad_id = self.end_id if pad_id is None else pad_id
        model_config = read_model_config(parameters.get("gpt_model_path", ""))
        self.vocab_size = int(model_config.get("vocab_size", 0)) or self.tokenizer.vocab_size
        self.max_tokens = MAX_CONTEXTS * int(model_config.get("max_position_embeddings", 0))

    def execute(self, requests):
        return [self.process(request) for request in requests]

    def process(self, request):
        inputs = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
        if not self.has_batch_dim:
            inputs = {name: array[None] for name, array in inputs.items()}
        try:
            outputs = self.preprocess(inputs)
        except ValueError as error:
            return pb_utils.InferenceResponse(
                error=pb_utils.TritonError(f"preprocessing: {error}", pb_utils.TritonError.INVALID_ARG)
            )
        if not self.has_batch_dim:
            outputs = {name: array[0] for name, array in outputs.items()}
        return pb_utils.InferenceResponse([pb_utils.Tensor(name, array) for name, array in outputs.items()])

    def preprocess(self, inputs):
        """Map inputs to outputs. Both are arrays by name, with a batch dimension.

        Outputs of absent optional inputs are omitted.
        """
        batch_size = len(inputs["QUERY"])
        if not batch_size:
            raise ValueError("QUERY: has no rows")
        input_ids, lengths = self.encode("QUERY", inputs)
        outputs = {
            "INPUT_ID": input_ids,
            "REQUEST_INPUT_LEN": lengths,
            "REQUEST_OUTPUT_LEN": inputs["REQUEST_OUTPUT_LEN"],
            "BAD_WORDS_IDS": self.encode_words("BAD_WORDS_DICT", inputs, batch_size),
            "STOP_WORDS_IDS": self.encode_words("STOP_WORDS_DICT", inputs, batch_size),
            "EMBEDDING_BIAS": self.logit_biases(inputs, batch_size),
            "OUT_END_ID": inputs.get("END_ID", np.full((batch_size, 1), self.end_id, np.int32)),
            "OUT_PAD_ID": inputs.get("PAD_ID", np.full((batch_size, 1), self.pad_id, np.int32)),
        }
        if "DECODER_QUERY" in inputs:
            decoder_ids, decoder_lengths = self.encode("DECODER_QUERY", inputs)
        else:  # the start token of a decoder, which models without an encoder ignore
            decoder_ids, decoder_lengths = outputs["OUT_PAD_ID"], np.ones((batch_size, 1), np.int32)
        outputs |= {"DECODER_INPUT_ID": decoder_ids, "REQUEST_DECODER_INPUT_LEN": decoder_lengths}
        if "PROMPT_TABLE_EXTRA_ID" in inputs:
            # Ids beyond the vocabulary are rows of the prompt embedding table.
            is_virtual = input_ids >= self.vocab_size
            outputs["OUT_PROMPT_TABLE_EXTRA_IDS"] = np.where(is_virtual, inputs["PROMPT_TABLE_EXTRA_ID"], 0)
        return outputs

    def encode(self, name, inputs):
        """Tokenize an input. Returns ids int32[batch, longest], padded on the right, and lengths int32[batch, 1]."""
        texts = [decode_text(name, text) for text in inputs[name].flat]
        for text in texts if self.max_tokens else ():
            _, at_least = cut_text(self.tokenizer, text, self.max_tokens)
            if at_least:
                raise ValueError(f"{name}: is at least {at_least} tokens long, too long for the model")
        ids = self.tokenizer.encode_batch(texts, add_special_tokens=self.add_special_tokens)
        return pad(ids, self.pad_id), np.array([[len(row)] for row in ids], np.int32)

    def encode_words(self, name, inputs, batch_size):
        """Return word lists int32[batch, 2, longest]: concatenated token ids, and end offset of each word (-1: none).

        Each word is included with and without a leading space, because these are different tokens.
        """
        if name not in inputs:
            return np.zeros((batch_size, 2, 0), np.int32)
        words = [[decode_word(name, word) for word in row.flat if word] for row in inputs[name]]
        variants = [self.tokenize_variants(row) for row in words]
        ids = [[token for word in row for token in word] for row in variants]
        ends = [np.cumsum([len(word) for word in row], dtype=int) for row in variants]
        longest = max(1, *map(len, ids))
        return np.stack([pad(ids, 0, longest), pad(ends, -1, longest)], axis=1)

    def tokenize_variants(self, words):
        texts = [text for word in words for text in (word, " " + word.lstrip())]
        ids = self.tokenizer.encode_batch(texts, add_special_tokens=False)
        return [variant for variant in dict.fromkeys(map(tuple, ids)) if variant]

    def logit_biases(self, inputs, batch_size):
        """Return float32[batch, vocab_size]; float32[batch, 0] without biases."""
        words, weights = inputs.get("EMBEDDING_BIAS_WORDS"), inputs.get("EMBEDDING_BIAS_WEIGHTS")
        if words is None and weights is None:
            return np.zeros((batch_size, 0), np.float32)
        if words is None or weights is None or words.size != weights.size:
            raise ValueError(
                "embedding_bias_words and embedding_bias_weights must have the same number of elements"
            )
        biases = np.zeros((batch_size, self.vocab_size), np.float32)
        rows = zip(biases, words.reshape(batch_size, -1), weights.reshape(batch_size, -1), strict=True)
        for bias, row_words, row_weights in rows:
            for word, weight in zip(row_words, row_weights, strict=True):
                text = decode_word("EMBEDDING_BIAS_WORDS", word)
                np.add.at(bias, self.tokenizer.encode(text, add_special_tokens=False), weight)
        return biases


def check_tokenizer_type(name):
    if name and not name.startswith("${") and name not in TOKENIZER_TYPES:
        raise ValueError(f"tokenizer_type: is '{name}', expected one of {', '.join(TOKENIZER_TYPES)}")


def decode_text(name, data):
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise ValueError(f"{name}: is not UTF-8") from None


def decode_word(name, data):
    text = decode_text(name, data)
    if len(text) > MAX_WORD_LENGTH:
        raise ValueError(f"{name}: each must be at most {MAX_WORD_LENGTH} long, got one of {len(text)}")
    return text


def pad(rows, value, length=None):
    """Return int32[len(rows), length], padded on the right; `length` defaults to the longest row."""
    length = max(map(len, rows)) if length is None else length
    array = np.full((len(rows), length), value, np.int32)
    for target, row in zip(array, rows, strict=True):
        target[: len(row)] = row
    return array


def read_model_config(model_path):
    """Read the checkpoint's config.json; empty if there is none. Its vocabulary can exceed the tokenizer's."""
    try:
        path = resolve_model(model_path, patterns=TOKENIZER_FILES) / "config.json"
    except ModelNotFound:
        return {}
    return json.loads(path.read_text()) if path.is_file() else {}

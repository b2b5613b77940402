"""From text to what the model tensorrt_llm takes: token ids, lists of words as token ids, biases of tokens."""

import json
from pathlib import Path

import numpy as np
import triton_python_backend_utils as pb_utils

from neso import load_tokenizer

NO_WORDS = np.zeros((2, 0), np.int32)
NO_BIAS = np.zeros(0, np.float32)


class TritonPythonModel:
    def initialize(self, args):
        config = json.loads(args["model_config"])
        parameters = {name: value["string_value"] for name, value in config["parameters"].items()}
        self.batches = config["max_batch_size"] > 0
        self.tokenizer = load_tokenizer(parameters["tokenizer_dir"])
        self.add_special_tokens = parameters.get("add_special_tokens", "").lower() not in ("false", "0", "no")
        ends = self.tokenizer.eos_token_ids
        self.end_id = ends[0] if ends else -1
        pad = self.tokenizer.pad_token_id
        self.pad_id = self.end_id if pad is None else pad
        self.vocab_size = vocabulary_of(parameters.get("gpt_model_path", "")) or self.tokenizer.vocab_size

    def execute(self, requests):
        return [self.respond(request) for request in requests]

    def respond(self, request):
        inputs = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
        if not self.batches:
            inputs = {name: array[None] for name, array in inputs.items()}
        try:
            outputs = self.preprocess(inputs)
        except ValueError as error:
            return pb_utils.InferenceResponse(
                error=pb_utils.TritonError(f"preprocessing: {error}", pb_utils.TritonError.INVALID_ARG)
            )
        if not self.batches:
            outputs = {name: array[0] for name, array in outputs.items()}
        return pb_utils.InferenceResponse([pb_utils.Tensor(*output) for output in outputs.items()])

    def preprocess(self, inputs):
        """All arrays begin with the batch dimension. Outputs that belong to an absent input are left out."""
        rows = len(inputs["QUERY"])
        if not rows:
            raise ValueError("QUERY: has no rows")
        input_ids, lengths = self.encode("QUERY", inputs)
        outputs = {
            "INPUT_ID": input_ids,
            "REQUEST_INPUT_LEN": lengths,
            "REQUEST_OUTPUT_LEN": inputs["REQUEST_OUTPUT_LEN"],
            "BAD_WORDS_IDS": self.word_lists("BAD_WORDS_DICT", inputs, rows),
            "STOP_WORDS_IDS": self.word_lists("STOP_WORDS_DICT", inputs, rows),
            "EMBEDDING_BIAS": self.biases(inputs, rows),
            "OUT_END_ID": inputs.get("END_ID", np.full((rows, 1), self.end_id, np.int32)),
            "OUT_PAD_ID": inputs.get("PAD_ID", np.full((rows, 1), self.pad_id, np.int32)),
        }
        if "DECODER_QUERY" in inputs:
            decoder_ids, decoder_lengths = self.encode("DECODER_QUERY", inputs)
            outputs |= {"DECODER_INPUT_ID": decoder_ids, "REQUEST_DECODER_INPUT_LEN": decoder_lengths}
        if "PROMPT_TABLE_EXTRA_ID" in inputs:
            virtual = input_ids >= self.vocab_size
            outputs["OUT_PROMPT_TABLE_EXTRA_IDS"] = np.where(virtual, inputs["PROMPT_TABLE_EXTRA_ID"], 0)
        return outputs

    def encode(self, name, inputs):
        """Token ids int32[rows, longest], padded behind, and lengths int32[rows, 1]."""
        texts = [text_of(name, text) for text in inputs[name].flat]
        ids = self.tokenizer.encode_batch(texts, add_special_tokens=self.add_special_tokens)
        return padded(ids, self.pad_id), np.array([[len(row)] for row in ids], np.int32)

    def word_lists(self, name, inputs, rows):
        """int32[rows, 2, longest]: the words' tokens one after the other, and where each word ends.

        A word counts as it is written and as it is written behind a space, which are other tokens.
        """
        if name not in inputs:
            return np.broadcast_to(NO_WORDS, (rows, *NO_WORDS.shape))
        words = [[text_of(name, word) for word in row.flat if word] for row in inputs[name]]
        lists = [self.spellings(row) for row in words]
        ids = [[token for spelling in spellings for token in spelling] for spellings in lists]
        ends = [np.cumsum([len(spelling) for spelling in spellings], dtype=int) for spellings in lists]
        longest = max(1, *map(len, ids))
        return np.stack([padded(ids, 0, longest), padded(ends, -1, longest)], axis=1)

    def spellings(self, words):
        texts = [form for word in words for form in (word, " " + word.lstrip())]
        ids = self.tokenizer.encode_batch(texts, add_special_tokens=False)
        return [spelling for spelling in dict.fromkeys(map(tuple, ids)) if spelling]

    def biases(self, inputs, rows):
        """float32[rows, vocabulary]: what is added to the logit of each token."""
        words, weights = inputs.get("EMBEDDING_BIAS_WORDS"), inputs.get("EMBEDDING_BIAS_WEIGHTS")
        if words is None and weights is None:
            return np.broadcast_to(NO_BIAS, (rows, 0))
        if words is None or weights is None or words.size != weights.size:
            raise ValueError(
                "embedding_bias_words and embedding_bias_weights must come together, one for one"
            )
        biases = np.zeros((rows, self.vocab_size), np.float32)
        for bias, row, values in zip(biases, words.reshape(rows, -1), weights.reshape(rows, -1), strict=True):
            for word, weight in zip(row, values, strict=True):
                text = text_of("EMBEDDING_BIAS_WORDS", word)
                np.add.at(bias, self.tokenizer.encode(text, add_special_tokens=False), weight)
        return biases


def text_of(name, text):
    try:
        return text.decode()
    except UnicodeDecodeError:
        raise ValueError(f"{name}: is not UTF-8") from None


def padded(rows, filler, length=None):
    length = max(map(len, rows)) if length is None else length
    array = np.full((len(rows), length), filler, np.int32)
    for target, row in zip(array, rows, strict=True):
        target[: len(row)] = row
    return array


def vocabulary_of(model):
    """The rows of the model's logits, which may be more than the tokenizer has tokens; 0 if it does not tell."""
    path = Path(model) / "config.json"
    return int(json.loads(path.read_text()).get("vocab_size", 0)) if path.is_file() else 0

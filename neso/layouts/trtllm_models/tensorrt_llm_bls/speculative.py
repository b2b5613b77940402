"""Speculative decoding with a separate draft model.

In each round, the draft model proposes up to `num_draft_tokens` tokens; tensorrt_llm accepts a prefix of them and
generates one more token. Greedy results equal the results of tensorrt_llm alone. With `use_draft_logits`, tokens are
sampled and accepted so that they follow tensorrt_llm's distribution.
"""

import numpy as np

from pipeline import RequestError, read_flag, read_prompt


async def generate_with_draft(pipeline, inputs, prepared, request_id):
    """Generate a whole completion; returns tensorrt_llm's outputs. Raises `RequestError` for unsupported inputs."""
    check_inputs(pipeline, inputs)
    rounds = SpeculativeRounds(pipeline, prepared, request_id, read_flag(inputs, "use_draft_logits"))
    max_tokens = int(prepared["request_output_len"].flat[0])
    num_draft_tokens = int(inputs["num_draft_tokens"].flat[0])
    generated, num_drafted, num_accepted, finished = [], 0, 0, False
    while len(generated) < max_tokens and not finished:
        count = min(num_draft_tokens, max_tokens - len(generated) - 1)
        draft, logits = await rounds.propose(generated, count) if count else ([], None)
        new = await rounds.verify(generated, draft, logits)
        num_drafted += len(draft)
        num_accepted += common_prefix_length(draft, new)
        generated, finished = rounds.append(generated, new)
    return rounds.make_outputs(generated, num_drafted, num_accepted)


def check_inputs(pipeline, inputs):
    if not pipeline.draft:
        raise RequestError.invalid(
            "num_draft_tokens: needs a draft model, tensorrt_llm_draft_model_name names none"
        )
    if int(inputs["num_draft_tokens"].flat[0]) < 0:
        raise RequestError.invalid("num_draft_tokens: must be at least 0")
    for name in ("stream", "return_context_logits", "return_generation_logits", "return_log_probs"):
        if read_flag(inputs, name):
            raise RequestError.invalid(f"{name}: is not supported with num_draft_tokens")
    for name in ("beam_width", "num_return_sequences"):
        if name in inputs and int(inputs[name].flat[0]) > 1:
            raise RequestError.invalid(f"{name}: must be 1 with num_draft_tokens")


class SpeculativeRounds:
    """Requests to the draft model and to tensorrt_llm, each continuing from the tokens generated so far."""

    def __init__(self, pipeline, prepared, request_id, use_logits):
        self.pipeline, self.prepared = pipeline, prepared
        self.request_id, self.use_logits = request_id, use_logits
        self.prompt = read_prompt(prepared)
        self.stop_words = read_word_list(prepared.get("stop_words_list"))
        self.echo_prompt = False

    async def propose(self, generated, count):
        """Return draft tokens and, with `use_logits`, the logits [tokens, vocab_size] that they were sampled from."""
        inputs = self.make_inputs(generated, count)
        if self.use_logits:
            inputs["return_generation_logits"] = np.array([[True]])
        outputs = await self.run(inputs, self.pipeline.draft)
        draft = self.read_new_tokens(generated, outputs)
        logits = outputs["generation_logits"][0, 0, : len(draft)] if self.use_logits and draft else None
        return draft, logits

    async def verify(self, generated, draft, logits):
        """Return the accepted draft tokens and one more token; empty if the sequence has ended."""
        inputs = self.make_inputs(generated, len(draft) + 1)
        if draft:
            inputs["draft_input_ids"] = np.array([draft], np.int32)
            if logits is not None:
                inputs["draft_logits"] = logits[None].astype(np.float32)
        outputs = await self.run(inputs, self.pipeline.generation)
        new = self.read_new_tokens(generated, outputs)
        self.echo_prompt = int(outputs["sequence_length"].flat[0]) > len(new)
        return new

    async def run(self, inputs, model):
        async with self.pipeline.generate(inputs, self.request_id, model) as responses:
            return await anext(responses)

    def make_inputs(self, generated, max_tokens):
        ids = self.prompt + generated
        changed = {
            "input_ids": np.array([ids], np.int32),
            "input_lengths": np.array([[len(ids)]], np.int32),
            "request_output_len": np.array([[max_tokens]], np.int32),
        }
        for name in ("min_length", "min_tokens"):
            if name in self.prepared:
                remaining = int(self.prepared[name].flat[0]) - len(generated)
                changed[name] = np.array([[min(max(remaining, 0), max_tokens)]], np.int32)
        for name in ("random_seed", "seed"):
            if name in self.prepared:  # the same seed in each round would repeat the same random numbers
                changed[name] = self.prepared[name] + np.uint64(len(generated))
        return self.prepared | changed

    def read_new_tokens(self, generated, outputs):
        """Return the output tokens, without the prompt if the model echoes it."""
        ids = outputs["output_ids"][0, 0, : int(outputs["sequence_length"].flat[0])].tolist()
        context = self.prompt + generated
        return ids[len(context) :] if ids[: len(context)] == context else ids

    def append(self, generated, new):
        """Return all tokens up to the first stop word, which can span rounds, and whether the sequence is finished."""
        tokens = generated + new
        for end in range(len(generated) + 1, len(tokens) + 1):
            for word in self.stop_words:
                if tokens[max(end - len(word), 0) : end] == word:
                    return tokens[:end], True
        return tokens, not new

    def make_outputs(self, generated, num_drafted, num_accepted):
        ids = self.prompt + generated if self.echo_prompt else generated
        acceptance_rate = num_accepted / num_drafted if num_drafted else 0.0
        return {
            "output_ids": np.array([[ids]], np.int32),
            "sequence_length": np.array([[len(ids)]], np.int32),
            "total_draft_tokens": np.array([[num_drafted]], np.int32),
            "total_accepted_draft_tokens": np.array([[num_accepted]], np.int32),
            "acceptance_rate": np.array([[acceptance_rate]], np.float32),
        }


def read_word_list(array):
    """Read the words in int32[1, 2, length]: concatenated token ids, and the end offset of each word, then -1."""
    words, start = [], 0
    for end in [] if array is None else array[0, 1].tolist():
        if end < 0:
            break
        words.append(array[0, 0, start:end].tolist())
        start = end
    return words


def common_prefix_length(first, second):
    pairs = zip(first, second, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))

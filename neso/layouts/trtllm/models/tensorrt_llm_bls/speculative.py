"""Speculative decoding by two models: a small one guesses a few tokens, tensorrt_llm keeps those that are right.

Each round asks the draft model for `num_draft_tokens` tokens and gives them to tensorrt_llm, which answers with the
ones that it accepts and one more of its own. With greedy decoding the result is what tensorrt_llm says alone; with
`use_draft_logits` tokens are drawn, and accepted so that they have tensorrt_llm's distribution.
"""

import numpy as np

from chain import RequestError, flag, prompt_of


async def speculate(chain, inputs, prepared, request_id):
    """The outputs of tensorrt_llm as if it had answered at once. `RequestError` for what does not go together."""
    check(chain, inputs)
    rounds = Rounds(chain, prepared, request_id, flag(inputs, "use_draft_logits"))
    wanted = int(prepared["request_output_len"].flat[0])
    guesses = int(inputs["num_draft_tokens"].flat[0])
    generated, drafted, accepted, ended = [], 0, 0, False
    while len(generated) < wanted and not ended:
        number = min(guesses, wanted - len(generated) - 1)
        draft, logits = await rounds.guess(generated, number) if number else ([], None)
        new = await rounds.verify(generated, draft, logits)
        drafted += len(draft)
        accepted += common(draft, new)
        generated, ended = rounds.joined(generated, new)
    return rounds.outputs(generated, drafted, accepted)


def check(chain, inputs):
    """What cannot be had beside speculative decoding."""
    if not chain.draft:
        raise RequestError.invalid(
            "num_draft_tokens: needs a draft model, tensorrt_llm_draft_model_name names none"
        )
    if int(inputs["num_draft_tokens"].flat[0]) < 0:
        raise RequestError.invalid("num_draft_tokens: must be at least 0")
    for name in ("stream", "return_context_logits", "return_generation_logits", "return_log_probs"):
        if flag(inputs, name):
            raise RequestError.invalid(f"{name}: is not supported with num_draft_tokens")
    for name in ("beam_width", "num_return_sequences"):
        if name in inputs and int(inputs[name].flat[0]) > 1:
            raise RequestError.invalid(f"{name}: must be 1 with num_draft_tokens")


class Rounds:
    """Asks the two models to go on from what there is."""

    def __init__(self, chain, prepared, request_id, use_logits):
        self.chain, self.prepared, self.request_id, self.use_logits = chain, prepared, request_id, use_logits
        self.prompt = prompt_of(prepared)
        self.stop_words = words_of(prepared.get("stop_words_list"))
        self.shows_prompt = False

    async def guess(self, generated, number):
        """Tokens of the draft model, and the logits that it drew them from where those are to be used."""
        inputs = self.inputs(generated, number)
        if self.use_logits:
            inputs["return_generation_logits"] = np.array([[True]])
        outputs = await self.run(inputs, self.chain.draft)
        draft = self.new_tokens(generated, outputs)
        return draft, outputs["generation_logits"][0, 0, : len(draft)] if self.use_logits and draft else None

    async def verify(self, generated, draft, logits):
        """The guesses that tensorrt_llm accepts, and one token more; none if it has nothing more to say."""
        inputs = self.inputs(generated, len(draft) + 1)
        if draft:
            inputs["draft_input_ids"] = np.array([draft], np.int32)
            if logits is not None:
                inputs["draft_logits"] = logits[None].astype(np.float32)
        outputs = await self.run(inputs, self.chain.generation)
        new = self.new_tokens(generated, outputs)
        self.shows_prompt = int(outputs["sequence_length"].flat[0]) > len(new)
        return new

    async def run(self, inputs, model):
        async with self.chain.generation_of(inputs, self.request_id, model) as responses:
            return await anext(responses)

    def inputs(self, generated, number):
        ids = self.prompt + generated
        changed = {
            "input_ids": np.array([ids], np.int32),
            "input_lengths": np.array([[len(ids)]], np.int32),
            "request_output_len": np.array([[number]], np.int32),
        }
        for name in ("min_length", "min_tokens"):
            if name in self.prepared:
                left = int(self.prepared[name].flat[0]) - len(generated)
                changed[name] = np.array([[min(max(left, 0), number)]], np.int32)
        for name in ("random_seed", "seed"):
            if name in self.prepared:  # another one in each round: the same would draw the same again
                changed[name] = self.prepared[name] + np.uint64(len(generated))
        return self.prepared | changed

    def new_tokens(self, generated, outputs):
        """Behind what was given, if the output begins with that."""
        ids = outputs["output_ids"][0, 0, : int(outputs["sequence_length"].flat[0])].tolist()
        given = self.prompt + generated
        return ids[len(given) :] if ids[: len(given)] == given else ids

    def joined(self, generated, new):
        """All tokens to the end of a stop word, which may begin in an earlier round, and whether this is the end."""
        known = generated + new
        for end in range(len(generated) + 1, len(known) + 1):
            for word in self.stop_words:
                if known[max(end - len(word), 0) : end] == word:
                    return known[:end], True
        return known, not new

    def outputs(self, generated, drafted, accepted):
        ids = self.prompt + generated if self.shows_prompt else generated
        return {
            "output_ids": np.array([[ids]], np.int32),
            "sequence_length": np.array([[len(ids)]], np.int32),
            "total_draft_tokens": np.array([[drafted]], np.int32),
            "total_accepted_draft_tokens": np.array([[accepted]], np.int32),
            "acceptance_rate": np.array([[accepted / drafted if drafted else 0.0]], np.float32),
        }


def words_of(array):
    """The words in int32[1, 2, length]: their tokens in a row, and where each ends, then -1."""
    words, start = [], 0
    for end in [] if array is None else array[0, 1].tolist():
        if end < 0:
            break
        words.append(array[0, 0, start:end].tolist())
        start = end
    return words


def common(first, second):
    """How many elements two lists begin with that are alike."""
    pairs = zip(first, second, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))

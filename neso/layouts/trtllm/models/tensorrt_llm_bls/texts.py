"""The texts of a request's sequences: of whole ones, and of those that come token by token."""

REPLACEMENT = "\ufffd"
"""What stands for the bytes of a character that is not complete."""
MAX_CHARACTER_TOKENS = 4
CONTEXT = 8


class Texts:
    """What each response of tensorrt_llm adds to the text of its sequence.

    `accumulates`: a stream tells all of the text each time, not what is new. `stopped`: all sequences have had a stop
    word; nothing that comes will be shown.
    """

    def __init__(self, decode, prompt, stop_words, *, streams, accumulates, num_sequences):
        self.decode, self.prompt, self.stop_words = decode, prompt, stop_words
        self.streams, self.accumulates, self.num_sequences = streams, accumulates, num_sequences
        self.growing = {}

    @property
    def stopped(self):
        ended = [growing.stopped for growing in self.growing.values()]
        return len(ended) == self.num_sequences and all(ended)

    async def of(self, sequence_index, sequences):
        """The texts of a response: one of a piece of a stream, or one for each beam. None: there is nothing to tell."""
        if not (self.streams and len(sequences) == 1):
            return await self.whole(sequences)
        growing = self.growing.get(sequence_index)
        if growing is None:
            growing = self.growing[sequence_index] = GrowingText(self.decode, self.prompt, self.stop_words)
        elif growing.stopped:
            return None
        new = await growing.add(sequences[0])
        return [growing.shown if self.accumulates else new]

    async def finish(self):
        """By sequence index: what was held back of streams that have ended."""
        rests = {index: await growing.finish() for index, growing in self.growing.items()}
        return {
            index: [self.growing[index].shown if self.accumulates else rest]
            for index, rest in rests.items()
            if rest
        }

    async def whole(self, sequences):
        """Decoded behind the prompt, whose last word and first character they may go on with."""
        prompt = self.prompt
        with_prompt = [ids if ids[: len(prompt)] == prompt else prompt + ids for ids in sequences]
        before, *texts = await self.decode([prompt, *with_prompt])
        shown = []
        for text, ids, all_ids in zip(texts, sequences, with_prompt, strict=True):
            generated = cut(difference(before, text), self.stop_words)[0]
            shown.append(before + generated if ids is all_ids else generated)
        return shown


class GrowingText:
    """Tells what each new token adds to the text: whole characters, with the spaces between words.

    Postprocessing knows only the tokens that it is given, and the text of a token may depend on the one before it. So
    it is given a few tokens more, with and without the new ones, and what differs is new. Nothing that is shown is
    taken back; stop words are not shown, nor is what comes after them.
    """

    def __init__(self, decode, prompt, stop_words):
        self.decode, self.stop_words = decode, stop_words
        self.known = prompt[-CONTEXT:]  # their text is out, or the prompt's
        self.pending = []
        self.held = ""  # may be the beginning of a stop word
        self.shown = ""
        self.stopped = False

    async def add(self, token_ids):
        """What may be shown now."""
        self.pending += token_ids
        text = await self.new_text()
        if text.endswith(REPLACEMENT) and len(self.pending) < MAX_CHARACTER_TOKENS:
            return ""
        self.known, self.pending = (self.known + self.pending)[-CONTEXT:], []
        return self.show(text)

    async def finish(self):
        """What was held back."""
        text = await self.new_text() if self.pending else ""
        self.pending = []
        return self.show(text, last=True)

    async def new_text(self):
        before, after = await self.decode([self.known, self.known + self.pending])
        return difference(before, after)

    def show(self, text, last=False):
        if self.stopped:
            return ""
        shown, self.stopped = cut(self.held + text, self.stop_words)
        begun = (
            0 if last or self.stopped else max((begins(word, shown) for word in self.stop_words), default=0)
        )
        self.held = shown[len(shown) - begun :]
        shown = shown[: len(shown) - begun]
        self.shown += shown
        return shown


def difference(before, after):
    """What a text has more than another, which it begins with but perhaps for a character that was not complete."""
    if after.startswith(before):
        return after[len(before) :]
    same = next((i for i, (a, b) in enumerate(zip(before, after, strict=False)) if a != b), len(after))
    return after[same:]


def cut(text, stop_words):
    """The text before the first stop word, and whether there is one."""
    ends = [text.find(word) for word in stop_words if word in text]
    return (text[: min(ends)], True) if ends else (text, False)


def begins(word, text):
    """How many characters at the end of a text may be the beginning of a word."""
    longest = min(len(text), len(word) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(word[:n])), 0)

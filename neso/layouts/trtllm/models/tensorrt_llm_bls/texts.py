"""The texts of a request's sequences: of whole ones, and of those that come token by token."""

REPLACEMENT = "\ufffd"
"""What stands for the bytes of a character that is not complete."""
MAX_CHARACTER_TOKENS = 4
"""UTF-8 has at most so many bytes."""


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
    it is given the last ones too, with and without the new ones, and what differs is new. Nothing that is shown is
    taken back; what comes behind a stop word is not shown.
    """

    def __init__(self, decode, prompt, stop_words):
        self.decode, self.stop_words = decode, stop_words
        self.known = prompt  # their text is out, or the prompt's; they begin and end with a character
        self.pending = []
        self.shown = ""
        self.stopped = False

    async def add(self, token_ids):
        """What may be shown now."""
        self.pending += token_ids
        text = await self.text_behind(len(self.pending))
        if text.endswith(REPLACEMENT):
            text = await self.text_of_whole_characters(text)
        return self.show(text)

    async def finish(self):
        """What was held back."""
        return self.show(await self.text_behind(len(self.pending))) if self.pending else ""

    async def text_behind(self, count):
        """Of the first so many tokens that are pending; they are so no longer, unless they end within a character."""
        before, after = await self.decode([self.known, self.known + self.pending[:count]])
        text = difference(before, after)
        if not text.endswith(REPLACEMENT):
            self.take(count, text)
        return text

    async def text_of_whole_characters(self, text):
        """All but the last character, which is not complete; it may be that it never will be."""
        for left_out in range(1, min(MAX_CHARACTER_TOKENS, len(self.pending))):
            before = await self.text_behind(len(self.pending) - left_out)
            if not before.endswith(REPLACEMENT):
                return before
        if len(self.pending) < MAX_CHARACTER_TOKENS:
            return ""
        self.take(len(self.pending), text)
        return text

    def take(self, count, text):
        """Tokens without a text of their own do not say how that of the next begins: others stay before them."""
        taken, self.pending = self.pending[:count], self.pending[count:]
        self.known = taken if text else self.known + taken

    def show(self, text):
        """Up to the end of the first stop word."""
        if self.stopped or not text:
            return ""
        longest = max(map(len, self.stop_words), default=1) - 1
        before = self.shown[-longest:] if longest else ""  # a stop word may begin there
        until, self.stopped = cut(before + text, self.stop_words, len(before))
        self.shown += until[len(before) :]
        return until[len(before) :]


def difference(before, after):
    """What a text has more than another, which it begins with but perhaps for a character that was not complete."""
    if after.startswith(before):
        return after[len(before) :]
    same = next((i for i, (a, b) in enumerate(zip(before, after, strict=False)) if a != b), len(after))
    return after[same:]


def cut(text, stop_words, start=0):
    """The text with the first stop word that ends behind `start`, and whether there is one."""
    ends = []
    for word in stop_words:
        found = text.find(word, max(start - len(word) + 1, 0))
        if found >= 0:
            ends.append(found + len(word))
    return (text[: min(ends)], True) if ends else (text, False)

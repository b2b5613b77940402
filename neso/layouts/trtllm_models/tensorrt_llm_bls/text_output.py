"""Detokenization of whole and streamed sequences, with stop words."""

REPLACEMENT = "\ufffd"  # stands for the bytes of an incomplete character
MAX_CHARACTER_TOKENS = 4  # a UTF-8 character has at most 4 bytes


class TextOutput:
    """Converts responses of tensorrt_llm to texts, for all sequences of one request.

    - decode: coroutine function, from lists of token ids to texts
    - accumulate: each response of a stream contains the whole text so far, not only the new part
    """

    def __init__(self, decode, prompt, stop_words, *, streaming, accumulate, num_sequences):
        self.decode, self.prompt, self.stop_words = decode, prompt, stop_words
        self.streaming, self.accumulate, self.num_sequences = streaming, accumulate, num_sequences
        self.streams = {}  # TextStream by sequence index

    @property
    def all_stopped(self):
        """Whether all streams have reached a stop word."""
        stopped = [stream.stopped for stream in self.streams.values()]
        return len(stopped) == self.num_sequences and all(stopped)

    async def add(self, sequence_index, sequences):
        """Return the texts of a response: one for a stream chunk, otherwise one per sequence. None if stopped."""
        if not (self.streaming and len(sequences) == 1):
            return await self.decode_whole(sequences)
        stream = self.streams.get(sequence_index)
        if stream is None:
            stream = self.streams[sequence_index] = TextStream(self.decode, self.prompt, self.stop_words)
        elif stream.stopped:
            return None
        new = await stream.add(sequences[0])
        return [stream.text if self.accumulate else new]

    async def finish(self):
        """Return the texts that streams have held back, by sequence index."""
        held_back = {index: await stream.finish() for index, stream in self.streams.items()}
        return {
            index: [self.streams[index].text if self.accumulate else text]
            for index, text in held_back.items()
            if text
        }

    async def decode_whole(self, sequences):
        """Decode with the prompt as prefix, because the text of a token can depend on the preceding token."""
        prompt = self.prompt
        with_prompt = [ids if ids[: len(prompt)] == prompt else prompt + ids for ids in sequences]
        prompt_text, *texts = await self.decode([prompt, *with_prompt])
        outputs = []
        for text, ids, all_ids in zip(texts, sequences, with_prompt, strict=True):
            generated, _ = cut_at_stop_word(added_text(prompt_text, text), self.stop_words)
            outputs.append(prompt_text + generated if ids is all_ids else generated)
        return outputs


class TextStream:
    """Incremental detokenizer of one sequence: emits complete characters, with the spaces between words.

    The text of a token can depend on the preceding token. Therefore pending tokens are decoded together with the last
    emitted tokens; the new text is the difference to the text of the emitted tokens alone. Emitted text never changes;
    text after a stop word is dropped.
    """

    def __init__(self, decode, prompt, stop_words):
        self.decode, self.stop_words = decode, stop_words
        self.context = prompt  # last emitted tokens; start and end at character boundaries
        self.pending = []
        self.text = ""
        self.stopped = False

    async def add(self, token_ids):
        """Add tokens and return the text that can be emitted."""
        self.pending += token_ids
        text = await self.decode_pending(len(self.pending))
        if text.endswith(REPLACEMENT):
            text = await self.decode_complete_characters(text)
        return self.emit(text)

    async def finish(self):
        """Return the text that was held back."""
        return self.emit(await self.decode_pending(len(self.pending))) if self.pending else ""

    async def decode_pending(self, count):
        """Return the text of the first `count` pending tokens. They stay pending if they end within a character."""
        before, after = await self.decode([self.context, self.context + self.pending[:count]])
        text = added_text(before, after)
        if not text.endswith(REPLACEMENT):
            self.advance(count, text)
        return text

    async def decode_complete_characters(self, text):
        """Return `text` without its incomplete last character, unless that has so many tokens that it is invalid."""
        for left_out in range(1, min(MAX_CHARACTER_TOKENS, len(self.pending))):
            shorter = await self.decode_pending(len(self.pending) - left_out)
            if not shorter.endswith(REPLACEMENT):
                return shorter
        if len(self.pending) < MAX_CHARACTER_TOKENS:
            return ""
        self.advance(len(self.pending), text)
        return text

    def advance(self, count, text):
        """Move pending tokens to the context. Tokens without text extend the context instead of replacing it."""
        moved, self.pending = self.pending[:count], self.pending[count:]
        self.context = moved if text else self.context + moved

    def emit(self, text):
        """Append to `self.text`, up to the first stop word. Returns the appended part."""
        if self.stopped or not text:
            return ""
        overlap = max(map(len, self.stop_words), default=1) - 1
        tail = self.text[-overlap:] if overlap else ""  # a stop word can start in this part
        kept, self.stopped = cut_at_stop_word(tail + text, self.stop_words, len(tail))
        self.text += kept[len(tail) :]
        return kept[len(tail) :]


def added_text(before, after):
    """Return the part of `after` that follows the common prefix. `before` can end within a character."""
    if after.startswith(before):
        return after[len(before) :]
    same = next((i for i, (a, b) in enumerate(zip(before, after, strict=False)) if a != b), len(after))
    return after[same:]


def cut_at_stop_word(text, stop_words, start=0):
    """Return the text up to and including the first stop word that ends after `start`, and whether one was found."""
    ends = []
    for word in stop_words:
        found = text.find(word, max(start - len(word) + 1, 0))
        if found >= 0:
            ends.append(found + len(word))
    return (text[: min(ends)], True) if ends else (text, False)

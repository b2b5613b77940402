"""A logits processor that restricts the output to a JSON schema, with LM Format Enforcer."""

from __future__ import annotations

from typing import Any

import numpy as np
from lmformatenforcer import JsonSchemaParser, TokenEnforcer, TokenEnforcerTokenizerData

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Paris", "Rome", "Oslo"]},
        "by_train": {"type": "boolean"},
    },
    "required": ["city", "by_train"],
    "additionalProperties": False,
}


MAX_STATES = 10_000
"""The enforcer stores a state for each output so far, and is replaced when it has this many."""


class TripSchema:
    """Created once by the engine; the instance is called in every step with the requests that chose it."""

    def __init__(self, context: Any) -> None:
        tokenizer = context.tokenizer
        first = tokenizer.encode("0", add_special_tokens=False)[-1]
        tokens = []
        for token_id in range(tokenizer.vocab_size):
            if token_id not in tokenizer.special_ids:
                # Decoded after another token, because some tokenizers drop the space at the start of a text.
                text = tokenizer.decode([first, token_id])[1:]
                tokens.append((token_id, text, len(text) > len(tokenizer.decode([token_id]))))
        data = TokenEnforcerTokenizerData(
            tokens, tokenizer.decode, list(tokenizer.eos_token_ids), False, context.vocab_size
        )
        self._new_enforcer = lambda: TokenEnforcer(data, JsonSchemaParser(SCHEMA))
        self._enforcer = self._new_enforcer()

    def __call__(self, logits: Any, sequences: Any) -> None:
        if len(self._enforcer.prefix_states) > MAX_STATES:
            self._enforcer = self._new_enforcer()
        for row, sequence in zip(logits, sequences, strict=True):
            allowed = self._allowed_after(sequence.output_token_ids)
            kept = row[allowed]
            row.fill(-np.inf)
            row[allowed] = kept

    def _allowed_after(self, token_ids: list[int]) -> list[int]:
        if tuple(token_ids[:-1]) not in self._enforcer.prefix_states:
            for end in range(len(token_ids)):
                self._enforcer.get_allowed_tokens(token_ids[:end])
        return self._enforcer.get_allowed_tokens(token_ids).allowed_tokens

"""Phrasings of each kind of question."""

from __future__ import annotations

import random

PATTERNS = {
    "what": (
        "What is {0}?",
        "what is {0}",
        "What is {0}",
        "Explain {0}.",
        "Tell me about {0}.",
        "What does {0} mean?",
        "Define {0}.",
        "Can you explain {0}?",
        "{0}?",
        "What's {0}?",
        "How does {0} work?",
        "What is meant by {0}?",
        "What is the use of {0}?",
        "I want to know what {0} means.",
        "Describe {0}.",
        "Why do I need {0}?",
    ),
    "how": (
        "How do I {0}?",
        "how do i {0}",
        "How can I {0}?",
        "how to {0}",
        "Show me how to {0}.",
        "Tell me how to {0}.",
        "What is the way to {0}?",
        "Is there a way to {0}?",
        "I want to {0}.",
    ),
    "why": ("Why {0}?", "why {0}", "Can you tell me why {0}?"),
    "json": ("Give me {0} as JSON.", "Show {0} in JSON.", "Write {0} as JSON", "{0} as JSON"),
}

HELD_OUT = {
    "what": "Please tell me what {0} is.",
    "how": "What do I do to {0}?",
}
"""Not used in training. The evaluation measures them without a threshold."""


def phrase(kind: str, names: list[str]) -> list[str]:
    """Return all questions about the topics `names`, the canonical one first. Raises `ValueError` for a bad kind."""
    if kind == "ask":
        plain = [name.rstrip("?!.").lower() for name in names]
        return list(dict.fromkeys([*names, *plain]))
    if kind not in PATTERNS:
        raise ValueError(f"there is no kind of question '{kind}', there are ask, {', '.join(PATTERNS)}")
    return list(dict.fromkeys(pattern.format(name) for name in names for pattern in PATTERNS[kind]))


OPENINGS = (
    "Hi, ",
    "Hello! ",
    "Please: ",
    "Hey, ",
    "Quick question: ",
    "So, ",
    "And ",
    "Sorry, ",
    "I wonder: ",
    "Now: ",
)
CLOSINGS = (" Thanks.", " Please.", " Answer briefly.", " I am new here.", " Thank you!")


def vary(question: str, rng: random.Random) -> str:
    """Return the question in other letters, without its mark, or with a polite word, half of the time as it is."""
    chance = rng.random()
    if chance < 0.5:
        return question
    if chance < 0.62:
        return question.lower()
    if chance < 0.74:
        return question.rstrip("?.!") or question
    if chance < 0.9:
        opening = rng.choice(OPENINGS)
        first = question if opening[-2] in ":!" else question[:1].lower() + question[1:]
        return opening + first
    return question + rng.choice(CLOSINGS)

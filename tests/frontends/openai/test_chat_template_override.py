"""`--chat-template`, and models without a tokenizer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from neso.engine.text import chat_template
from neso.frontends.openai.model_tokenizers import MISSING_TOKENIZER, ChatTemplateOverride
from neso.generation import InvalidParameter

MESSAGES = [{"role": "user", "content": "hi"}]


def test_template_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    def make_environment() -> Any:
        made.append(1)
        return real()

    real = chat_template.make_environment
    monkeypatch.setattr(chat_template, "make_environment", make_environment)
    source = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}{# compiled once #}"
    prompts = [
        ChatTemplateOverride(_tools(bos), source).apply_chat_template(MESSAGES) for bos in ("<s>", "<s>", "^")
    ]
    assert prompts == ["<s>hi", "<s>hi", "^hi"]
    assert len(made) == 2


def test_missing_tokenizer_rejects_token_ids() -> None:
    for send_request in (lambda: MISSING_TOKENIZER.encode("a"), lambda: MISSING_TOKENIZER.decode([1])):
        with pytest.raises(InvalidParameter, match="no tokenizer is known") as refused:
            send_request()
        assert refused.value.field == "model"
    assert (
        ChatTemplateOverride(MISSING_TOKENIZER, "{{ messages[0].content }}").apply_chat_template(MESSAGES)
        == "hi"
    )


def _tools(bos_token: str) -> Any:
    return SimpleNamespace(special_tokens=SimpleNamespace(texts={"bos_token": bos_token}))

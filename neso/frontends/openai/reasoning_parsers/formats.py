"""The ways in which models write their reasoning."""

from __future__ import annotations

from neso.frontends.openai.reasoning_parsers.base import ReasoningParser


class ThinkParser(ReasoningParser):
    """`<think>…</think>`: Qwen 3, DeepSeek V3.1, GLM 4.5 and many others. The prompt tells whether it is open."""

    opens = ("<think>",)
    closes = ("</think>",)
    special_tokens = ("<think>", "</think>")

    @classmethod
    def matches(cls, template: str) -> bool:
        return "</think>" in template or "<think>" in template


class DeepSeekR1Parser(ThinkParser):
    """The same of models that always reason and may leave the opening tag out."""

    always_reasons = True

    @classmethod
    def matches(cls, template: str) -> bool:
        return False


class MistralParser(ReasoningParser):
    """`[THINK]…[/THINK]`: Magistral."""

    opens = ("[THINK]",)
    closes = ("[/THINK]",)
    special_tokens = ("[THINK]", "[/THINK]")

    @classmethod
    def matches(cls, template: str) -> bool:
        return "[/THINK]" in template


class GraniteParser(ReasoningParser):
    """Granite 3.2 says it in words."""

    opens = ("Here is my thought process:", "Here's my thought process:")
    closes = ("Here is my response:", "Here's my response:")

    @classmethod
    def matches(cls, template: str) -> bool:
        return "Here is my thought process:" in template


class SeedOssParser(ReasoningParser):
    """`<seed:think>…</seed:think>`: Seed-OSS."""

    opens = ("<seed:think>",)
    closes = ("</seed:think>",)
    special_tokens = ("<seed:think>", "</seed:think>")

    @classmethod
    def matches(cls, template: str) -> bool:
        return "seed:think>" in template

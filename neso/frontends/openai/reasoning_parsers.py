"""Reasoning parsers: formats in which models write reasoning, and their detection by chat template."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from neso.frontends.openai.parser_registry import AUTO, ParserRegistry
from neso.frontends.openai.tool_parsers.text_reader import partial_end


@dataclass(frozen=True, slots=True)
class Split:
    """Text split into reasoning and content."""

    reasoning: str = ""
    content: str = ""


class ReasoningParser:
    """A format of reasoning before the content of a message.

    Subclasses set the marks. Other packages register subclasses as entry points of the group `neso.reasoning_parsers`;
    they are instantiated without arguments.
    """

    opens: ClassVar[tuple[str, ...]]
    """Marks that begin reasoning; none is a prefix of another."""
    closes: ClassVar[tuple[str, ...]]
    """Marks that end reasoning."""
    special_tokens: ClassVar[tuple[str, ...]] = ()
    """Special tokens in the marks; the parser receives them even if special tokens are skipped."""
    always_reasons: ClassVar[bool] = False
    """Whether the output begins with reasoning unless the prompt has closed it."""

    @classmethod
    def matches(cls, template: str) -> bool:
        """Whether models with this chat template use this format."""
        return False

    def begins_inside(self, prompt: str) -> bool:
        """Whether the output begins within reasoning. Many templates open reasoning at the end of the prompt."""
        if self.is_closed(prompt):
            return False
        return self.always_reasons or prompt.rstrip().endswith(self.opens)

    def is_closed(self, prompt: str) -> bool:
        """Whether the prompt ends with closed reasoning, which templates write if reasoning is disabled."""
        return prompt.rstrip().endswith(self.closes)

    def stream(self, prompt: str = "") -> ReasoningStream:
        """Create a parser of the output for `prompt`."""
        return ReasoningStream(self.opens, self.closes, inside=self.begins_inside(prompt))


class ReasoningStream:
    """Splits one message into reasoning and content incrementally.

    Whitespace around reasoning is dropped. The joined output does not depend on how the text was split.
    """

    def __init__(self, opens: tuple[str, ...], closes: tuple[str, ...], *, inside: bool) -> None:
        self._opens = opens
        self._closes = closes
        self._inside = inside
        self._state = self._read_open
        self._text = ""
        self._reasoning: list[str] = []
        self._content: list[str] = []

    @property
    def reasoning(self) -> bool:
        """Whether the current position is within reasoning."""
        return self._inside

    def feed(self, text: str) -> Split:
        """Add text. Returns the part that can be classified."""
        self._text += text
        while self._state():
            pass
        return self._take()

    def finish(self) -> Split:
        """End the text. Returns the held-back text."""
        if self._inside:
            self._reasoning.append(self._text if self._text.strip() else "")
        elif self._state != self._read_space:
            self._content.append(self._text)
        self._text = ""
        return self._take()

    def _read_open(self) -> bool:
        """Decide whether the text begins with reasoning; drop the opening mark, even if the prompt opened reasoning."""
        start = self._text.lstrip()
        for mark in self._opens:
            if start.startswith(mark):
                self._text = start[len(mark) :]
                self._inside = True
                self._state = self._read_reasoning_start
                return True
            if mark.startswith(start):
                return False
        self._state = self._read_reasoning_start if self._inside else self._read_content
        return True

    def _read_reasoning_start(self) -> bool:
        self._text = self._text.lstrip()
        if not self._text:
            return False
        self._state = self._read_reasoning
        return True

    def _read_reasoning(self) -> bool:
        """Collect reasoning up to its closing mark; hold back whitespace, which may be trailing."""
        found = [(at, mark) for mark in self._closes if (at := self._text.find(mark)) >= 0]
        if found:
            at, mark = min(found)
            self._reasoning.append(self._text[:at].rstrip())
            self._text = self._text[at + len(mark) :]
            self._inside = False
            self._state = self._read_space
            return True
        certain = self._text[: len(self._text) - partial_end(self._text, self._closes)].rstrip()
        self._reasoning.append(certain)
        self._text = self._text[len(certain) :]
        return False

    def _read_space(self) -> bool:
        self._text = self._text.lstrip()
        if not self._text:
            return False
        self._state = self._read_content
        return True

    def _read_content(self) -> bool:
        self._content.append(self._text)
        self._text = ""
        return False

    def _take(self) -> Split:
        split = Split("".join(self._reasoning), "".join(self._content))
        self._reasoning.clear()
        self._content.clear()
        return split


class ThinkParser(ReasoningParser):
    """`<think>…</think>`: Qwen 3, DeepSeek V3.1, GLM 4.5 and many others."""

    opens = ("<think>",)
    closes = ("</think>",)
    special_tokens = ("<think>", "</think>")

    @classmethod
    def matches(cls, template: str) -> bool:
        return "</think>" in template or "<think>" in template


class DeepSeekR1Parser(ThinkParser):
    """`<think>…</think>` of models that always reason and may omit the opening tag."""

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
    """Granite 3.2, which uses sentences as marks."""

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


GROUP = "neso.reasoning_parsers"
"""Entry point group of other packages' parsers."""

BUILTIN: dict[str, type[ReasoningParser]] = {
    "deepseek_r1": DeepSeekR1Parser,
    "granite": GraniteParser,
    "mistral": MistralParser,
    "qwen3": ThinkParser,
    "seed_oss": SeedOssParser,
}
ALIASES = {"think": "qwen3", "deepseek_v3": "qwen3", "glm45": "qwen3"}
NONE = "none"
"""Name for a model that does not reason."""

_REGISTRY = ParserRegistry("reasoning parser", GROUP, BUILTIN, ALIASES, words=(AUTO, NONE))


def find_reasoning_parser(name: str) -> ReasoningParser | None:
    """Return the parser of that name; None for "none". Raises `ValueError` listing the known names."""
    return None if name == NONE else _REGISTRY.find(name)


def detect_reasoning_parser(template: str) -> ReasoningParser | None:
    """Return the parser for models with this chat template, or None if it has no reasoning."""
    return _REGISTRY.detect(template)

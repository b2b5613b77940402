"""The grammar, as llguidance reads it, of what a request asks for."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from llguidance import LLMatcher, regex_to_lark
from llguidance.gbnf_to_lark import gbnf_to_lark

from neso.engine.guided.grammar_error import GrammarError
from neso.engine.guided.lark import quoted
from neso.engine.guided.structural_tag import structural_tag_lark
from neso.engine.guided.white_space import with_white_space
from neso.generation import GuidedDecoding

MAX_GRAMMAR_SIZE = 1 << 20
"""Characters of a schema, expression or grammar."""
MAX_GBNF_SIZE = 1 << 16
"""Characters of a GBNF grammar, which is converted in Python."""


NO_FORCING = '%llguidance {"no_forcing": true}'
"""The model chooses the tokens of text that a grammar forces. To find the ones that its tokenizer would take, the
library follows all of such text, at once: of `a{1000000}` for seconds."""


def grammar_text(guided: GuidedDecoding, special_tokens: Mapping[str, int]) -> str:
    """llguidance's text of the grammar. `special_tokens`: ids by name.

    Raises `GrammarError` for what is no grammar of its kind; more is found when it is compiled.
    """
    source = getattr(guided, guided.kind)
    if isinstance(source, str) and len(source) > MAX_GRAMMAR_SIZE:
        raise GrammarError(f"is {len(source)} characters long, at most {MAX_GRAMMAR_SIZE} are taken")
    try:
        match guided.kind:
            case "json" | "json_object":
                lark = f"start: %json {json.dumps(_schema(guided))}"
            case "regex":
                lark = f"start: /{regex_to_lark(source, use_ascii='')}/"
            case "choice":
                lark = "start: CHOICE\nCHOICE: " + " | ".join(map(quoted, source))
            case "grammar":
                lark = _lark(source)
            case _:
                lark = structural_tag_lark(json.loads(source), special_tokens)
    except GrammarError:
        raise
    except (ValueError, RecursionError) as error:
        raise GrammarError(str(error) or type(error).__name__) from None
    # The last of such lines counts, and errors have the lines of the client.
    return LLMatcher.grammar_from_lark(f"{lark}\n{NO_FORCING}\n")


_GBNF_RULE = re.compile(r"^[ \t]*[\w-]+[ \t]*::=", re.MULTILINE)
_POSITION = re.compile(r"^at \d+\(\d+\): ")
_CONTEXT = re.compile(r"\n +\d+ \| .*", re.DOTALL)


def clean_message(kind: str, message: str) -> str:
    """The compiler's message, without places in a text that the client did not write."""
    if kind == "grammar":
        return "\n".join(line for line in message.split("\n") if NO_FORCING not in line)
    return _CONTEXT.sub("", _POSITION.sub("", message)).removeprefix("failed to compile JSON schema: ")


def _schema(guided: GuidedDecoding) -> dict[str, Any]:
    """The schema, with the options for its white space."""
    schema: Any = json.loads(guided.json) if isinstance(guided.json, str) else True
    if schema is True:
        schema = {"type": "object"}
    options: dict[str, Any] = {}
    if guided.disable_any_whitespace:
        options["whitespace_flexible"] = False
    if guided.whitespace_pattern is not None:
        options["whitespace_pattern"] = guided.whitespace_pattern
    return with_white_space(schema, **options)


def _lark(source: str) -> str:
    """Lark as it is, GBNF converted."""
    if not _GBNF_RULE.search(source):
        return source
    if len(source) > MAX_GBNF_SIZE:
        raise GrammarError(f"is {len(source)} characters long, at most {MAX_GBNF_SIZE} of GBNF are taken")
    try:
        lark: str = gbnf_to_lark(source)
    except Exception as error:  # the converter raises bare Exception
        raise GrammarError(f"cannot be read as GBNF: {error}") from None
    return lark

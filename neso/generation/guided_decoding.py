"""Guided decoding: constraints on the text of the output."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import msgspec

from neso.generation.errors import InvalidParameter, check_unicode

KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
"""Kinds of constraints; a guided request has exactly one."""

_MAX_CHOICES = 10_000
_WHITESPACE = ("whitespace_pattern", "disable_any_whitespace")
_TEXT_FIELDS = ("json", "regex", "grammar", "structural_tag", "whitespace_pattern")


class GuidedDecoding(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A constraint on the output of one request, with vLLM's names; exactly one of `KINDS` is set.

    - json: a JSON schema, as an object or JSON text; True for any object
    - regex: regular expression that matches the whole output; Rust's syntax, without look-around and back-references
    - choice: strings, one of which is the output; a list is accepted
    - grammar: a grammar in llguidance's dialect of Lark, or in GBNF
    - json_object: any JSON object
    - structural_tag: free text with structured parts after trigger strings; an object or JSON text
    - whitespace_pattern: regular expression for the whitespace between the tokens of JSON
    - disable_any_whitespace: no whitespace between the tokens of JSON
    - source_field: the request field that contains the constraint, for error messages

    Raises `InvalidParameter`. Schemas and grammars are checked later, when they are compiled.
    """

    json: str | dict[str, Any] | bool | None = None
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    grammar: str | None = None
    json_object: bool = False
    structural_tag: str | dict[str, Any] | None = None
    whitespace_pattern: str | None = None
    disable_any_whitespace: bool = False
    source_field: str = ""

    def __post_init__(self) -> None:
        given = [kind for kind in KINDS if getattr(self, kind) not in (None, False)]
        if len(given) != 1:
            found = f"{' and '.join(given)} are given" if given else "none is given"
            raise InvalidParameter(
                self.source_field or "guided_decoding",
                f"exactly one of {', '.join(KINDS)} is needed, {found}",
            )
        if self.choice is not None:
            self._check_choice(self.choice)
            msgspec.structs.force_setattr(self, "choice", tuple(self.choice))
        if self.whitespace_pattern is not None or self.disable_any_whitespace:
            self._check_whitespace()
        for kind in ("json", "structural_tag"):
            value = getattr(self, kind)
            if isinstance(value, str):
                self._check_json(value)
            elif isinstance(value, dict):
                # JSON text can be sent to the engine process with numbers of any size.
                msgspec.structs.force_setattr(self, kind, json.dumps(value, ensure_ascii=False))
        for kind in ("regex", "grammar"):
            if getattr(self, kind) == "":
                raise InvalidParameter(self.field, "is empty")
        for kind in _TEXT_FIELDS:
            value = getattr(self, kind)
            if isinstance(value, str):
                check_unicode(self.field, value)

    @property
    def kind(self) -> str:
        """The kind of constraint, one of `KINDS`."""
        return next(kind for kind in KINDS if getattr(self, kind) not in (None, False))

    @property
    def field(self) -> str:
        """The field name for error messages."""
        return self.source_field or f"guided_decoding.{self.kind}"

    def _check_choice(self, choice: tuple[str, ...]) -> None:
        strings = isinstance(choice, list | tuple) and all(isinstance(text, str) for text in choice)
        if not strings or not choice or not all(choice):
            raise InvalidParameter(self.field, "choices must be strings that are not empty, at least one")
        for text in choice:
            check_unicode(self.field, text)
        if len(choice) > _MAX_CHOICES:
            raise InvalidParameter(
                self.field, f"has {len(choice)} choices, at most {_MAX_CHOICES} are allowed"
            )

    def _check_whitespace(self) -> None:
        if self.kind not in ("json", "json_object"):
            raise InvalidParameter(self.field, f"{' and '.join(_WHITESPACE)} are for JSON only")
        if self.whitespace_pattern is not None and self.disable_any_whitespace:
            raise InvalidParameter(self.field, f"{' and '.join(_WHITESPACE)} exclude each other")

    def _check_json(self, text: str) -> None:
        try:
            value = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise InvalidParameter(self.field, f"not valid JSON: {error}") from None
        if not isinstance(value, dict) and not (self.kind == "json" and value is True):
            raise InvalidParameter(self.field, f"must be a JSON object, got {type(value).__name__}")


_FIELD_TYPES = {field.name: field.type for field in msgspec.structs.fields(GuidedDecoding)}
_FLAT = {f"guided_{kind}": kind for kind in KINDS} | {f"guided_{name}": name for name in _WHITESPACE}
_FLAT["structural_tag"] = "structural_tag"
_OBJECTS = ("guided_decoding", "structured_outputs")
_GUIDE_TYPES = {
    "json": "json_object",
    "json_schema": "json",
    "regex": "regex",
    "ebnf_grammar": "grammar",
    "structural_tag": "structural_tag",
}
_GUIDE_TYPE, _GUIDE = "guided_decoding_guide_type", "guided_decoding_guide"
_RESPONSE_FORMAT = "response_format"

NAMES = frozenset({*_FLAT, *_OBJECTS, _GUIDE_TYPE, _GUIDE, _RESPONSE_FORMAT})
"""Names of request parameters for guided decoding."""


def read_guided_decoding(values: Mapping[str, Any]) -> GuidedDecoding | None:
    """Read the constraint from loosely typed request parameters (`NAMES`); None if there is none.

    Accepts `guided_json`, `guided_regex` and so on, an object `guided_decoding` or `structured_outputs`, OpenAI's
    `response_format`, and TensorRT-LLM's `guided_decoding_guide_type` with `guided_decoding_guide`. Objects can be
    JSON text. Raises `InvalidParameter`.
    """
    found = [reading for reading in _readings(values) if reading is not None]
    if len(found) > 1:
        names = " and ".join(reading.field for reading in found)
        raise InvalidParameter(found[1].field, f"{names} are given, only one constraint can be")
    return found[0] if found else None


def _readings(values: Mapping[str, Any]) -> list[GuidedDecoding | None]:
    given = {name: value for name, value in values.items() if name in NAMES and value is not None}
    flat = {name: value for name, value in given.items() if name in _FLAT}
    return [
        _read_flat(flat) if flat else None,
        *(_read_object(name, given[name]) for name in _OBJECTS if name in given),
        _read_response_format(given[_RESPONSE_FORMAT]) if _RESPONSE_FORMAT in given else None,
        _read_guide(given) if _GUIDE_TYPE in given or _GUIDE in given else None,
    ]


def _read_flat(flat: Mapping[str, Any]) -> GuidedDecoding | None:
    fields = {_FLAT[name]: _parse_flat_value(name, value) for name, value in flat.items()}
    if not any(kind in fields and fields[kind] is not False for kind in KINDS):
        if any(fields.get(name) not in (None, False, "false") for name in _WHITESPACE):
            raise InvalidParameter(next(iter(flat)), "is for guided_json and guided_json_object")
        return None
    source_field = next(name for name in flat if _FLAT[name] in KINDS)
    return _make(fields, source_field)


def _parse_flat_value(name: str, value: Any) -> Any:
    """Decode values that are sent as JSON text, because request parameters cannot be lists."""
    if name == "guided_choice" and isinstance(value, str):
        return _load(name, value)
    if name == "guided_json" and isinstance(value, str) and value.strip().lower() in ("true", "false"):
        return value.strip().lower() == "true"
    return value


def _read_object(name: str, value: Any) -> GuidedDecoding | None:
    if isinstance(value, GuidedDecoding):
        return value
    value = _as_object(name, value)
    fields = {key: entry for key, entry in value.items() if entry is not None}
    if not fields:
        return None
    kinds = [kind for kind in KINDS if fields.get(kind) not in (None, False)]
    return _make(fields, f"{name}.{kinds[0]}" if len(kinds) == 1 else name)


def _read_response_format(value: Any) -> GuidedDecoding | None:
    value = _as_object(_RESPONSE_FORMAT, value)
    kind = value.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return GuidedDecoding(json_object=True, source_field=_RESPONSE_FORMAT)
    if kind == "json_schema":
        named = value.get("json_schema")
        schema = named.get("schema") if isinstance(named, dict) else None
        if schema is None:
            raise InvalidParameter(_RESPONSE_FORMAT, "type json_schema needs json_schema with a schema")
        return _make({"json": schema}, _RESPONSE_FORMAT)
    if kind == "structural_tag":
        return _make({"structural_tag": value}, _RESPONSE_FORMAT)
    raise InvalidParameter(
        _RESPONSE_FORMAT, f"type must be text, json_object, json_schema or structural_tag, got {kind!r}"
    )


def _read_guide(given: Mapping[str, Any]) -> GuidedDecoding:
    """Read TensorRT-LLM's pair of parameters."""
    kind = given.get(_GUIDE_TYPE)
    if kind not in _GUIDE_TYPES:
        raise InvalidParameter(_GUIDE_TYPE, f"must be one of {', '.join(_GUIDE_TYPES)}, got {kind!r}")
    if kind == "json":
        return GuidedDecoding(json_object=True, source_field=_GUIDE_TYPE)
    if _GUIDE not in given:
        raise InvalidParameter(_GUIDE, f"is required with {_GUIDE_TYPE} {kind}")
    return _make({_GUIDE_TYPES[kind]: given[_GUIDE]}, _GUIDE)


def _make(fields: Mapping[str, Any], source_field: str) -> GuidedDecoding:
    converted: dict[str, Any] = {"source_field": source_field}
    for name, value in fields.items():
        if name not in _FIELD_TYPES or name == "source_field":
            raise InvalidParameter(source_field, f"has no field '{name}'")
        try:
            strict = name in ("json", "structural_tag")
            converted[name] = msgspec.convert(value, _FIELD_TYPES[name], strict=strict)
        except msgspec.ValidationError as error:
            raise InvalidParameter(
                source_field, f"{name}: {error}" if name not in source_field else str(error)
            ) from None
    return GuidedDecoding(**converted)


def _as_object(name: str, value: Any) -> dict[str, Any]:
    if isinstance(value, str):
        value = _load(name, value)
    if not isinstance(value, dict):
        raise InvalidParameter(name, f"must be a JSON object, got {type(value).__name__}")
    return value


def _load(name: str, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidParameter(name, f"not valid JSON: {error}") from None

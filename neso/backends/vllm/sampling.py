"""Sampling parameters for vLLM, of what clients of the tensor protocols write and of what front ends know."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import orjson

from neso.generation import GuidedDecoding, InvalidParameter, SamplingParams

_FORMS = ("structured_outputs", "guided_decoding")


def from_loose(values: Mapping[str, Any], types: Mapping[str, Any], form: frozenset[str]) -> dict[str, Any]:
    """vLLM's sampling parameters among JSON values or request parameters, which have neither lists nor objects.

    `types`: names and types of the parameters. `form`: the fields of a form of the output. Strings become what the
    parameter is; lists and objects may be JSON text. Raises `InvalidParameter`.
    """
    converted = {}
    for name, value in values.items():
        if value is None:
            continue
        if name in _FORMS:
            converted[name] = _form(name, value, form)
        elif name not in types:
            raise InvalidParameter(name, "vLLM has no such sampling parameter")
        else:
            converted[name] = _typed(name, value, types[name])
    return converted


def _typed(name: str, value: Any, kind: Any) -> Any:
    if isinstance(value, str) and value[:1] in ("[", "{"):
        try:
            return msgspec.convert(orjson.loads(value), kind, strict=False)
        except (orjson.JSONDecodeError, msgspec.ValidationError):
            pass  # a text that begins so, such as a stop string
        except TypeError:
            return orjson.loads(value)
    try:
        return msgspec.convert(value, kind, strict=False)
    except msgspec.ValidationError as error:
        raise InvalidParameter(name, f"{error}, got {value!r}") from None
    except TypeError:  # a type that only vLLM itself converts to
        return value


def _form(name: str, value: Any, fields: frozenset[str]) -> dict[str, Any]:
    """What the output must fit, as an object or its JSON text."""
    if isinstance(value, str):
        try:
            value = orjson.loads(value)
        except orjson.JSONDecodeError as error:
            raise InvalidParameter(name, f"not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise InvalidParameter(name, f"must be a JSON object, got {type(value).__name__}")
    unknown = sorted(value.keys() - fields)
    if unknown:
        raise InvalidParameter(name, f"has no field '{unknown[0]}', there are {', '.join(sorted(fields))}")
    if isinstance(value.get("structural_tag"), dict):
        value["structural_tag"] = orjson.dumps(value["structural_tag"]).decode()
    return value


_SAME = (
    "n",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "max_tokens",
    "min_tokens",
    "ignore_eos",
    "logprobs",
    "prompt_logprobs",
    "include_stop_str_in_output",
    "skip_special_tokens",
)
_LISTS = ("stop", "stop_token_ids", "bad_words", "allowed_token_ids")
_ELSEWHERE = ("logit_bias", "guided_decoding", "best_of", "shown_special_tokens")
_UNKNOWN = tuple(
    (field.name, field.default)
    for field in msgspec.structs.fields(SamplingParams)
    if field.name not in (*_SAME, *_LISTS, *_ELSEWHERE)
)
"""Names and defaults of what vLLM has no counterpart of."""


def from_params(params: SamplingParams) -> dict[str, Any]:
    """vLLM's parameters of Neso's. Raises `InvalidParameter` for those that vLLM has no counterpart of."""
    _refuse_unknown(params)
    values = {name: getattr(params, name) for name in _SAME}
    for name in _LISTS:
        given = getattr(params, name)
        if given:
            values[name] = list(given)
    if params.logit_bias:
        values["logit_bias"] = dict(params.logit_bias)
    if params.shown_special_tokens:
        values["skip_special_tokens"] = (
            False  # vLLM shows all of them or none; never the one that ends the text
        )
    if params.guided_decoding is not None:
        values["structured_outputs"] = _form_of(params.guided_decoding)
    return values


def _refuse_unknown(params: SamplingParams) -> None:
    for name, default in _UNKNOWN:
        if getattr(params, name) != default:
            raise InvalidParameter(name, "models on vLLM do not have it")
    if params.best_of is not None and params.best_of != params.n:
        raise InvalidParameter("best_of", "models on vLLM do not have it, other than equal to n")
    if not all(isinstance(word, str) for word in params.bad_words):
        raise InvalidParameter("bad_words", "models on vLLM take words as text only")


def _form_of(guided: GuidedDecoding) -> dict[str, Any]:
    if guided.kind == "json_object" or guided.json is True:
        form: dict[str, Any] = {"json_object": True}
    else:
        value = getattr(guided, guided.kind)
        form = {guided.kind: list(value) if guided.kind == "choice" else value}
    if guided.whitespace_pattern is not None:
        form["whitespace_pattern"] = guided.whitespace_pattern
    if guided.disable_any_whitespace:
        form["disable_any_whitespace"] = True
    return form

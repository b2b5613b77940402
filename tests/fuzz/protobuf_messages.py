"""Random messages of any protobuf type, by reflection."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from hypothesis import strategies as st

_INTEGERS = {
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
}

Overrides = Mapping[str, st.SearchStrategy[Any]]


@st.composite
def filled(
    draw: st.DrawFn, make: Callable[[], Any], overrides: Overrides, *, max_fields: int = 6, depth: int = 4
) -> Any:
    """Return `make()` with up to `max_fields` more fields set, in it and in each nested message.

    `overrides`: strategies of field values by full field name.
    """
    message = make()
    _fill(draw, message, overrides, max_fields, depth)
    return message


def _fill(draw: st.DrawFn, message: Any, overrides: Overrides, max_fields: int, depth: int) -> None:
    fields = [field for field in message.DESCRIPTOR.fields if depth > 0 or field.message_type is None]
    if not fields:
        return
    for field in draw(
        st.lists(st.sampled_from(fields), max_size=max_fields, unique_by=lambda field: field.name)
    ):
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            _fill_map(draw, getattr(message, field.name), field, overrides, max_fields, depth)
        elif field.is_repeated:
            for _ in range(draw(st.integers(0, 2))):
                if field.message_type is not None:
                    _fill(draw, getattr(message, field.name).add(), overrides, max_fields, depth - 1)
                else:
                    getattr(message, field.name).append(draw(_value(field, overrides)))
        elif field.message_type is not None:
            getattr(message, field.name).SetInParent()
            _fill(draw, getattr(message, field.name), overrides, max_fields, depth - 1)
        else:
            setattr(message, field.name, draw(_value(field, overrides)))


def _fill_map(
    draw: st.DrawFn, target: Any, field: FieldDescriptor, overrides: Overrides, max_fields: int, depth: int
) -> None:
    key, value = (field.message_type.fields_by_name[name] for name in ("key", "value"))
    for _ in range(draw(st.integers(0, 2))):
        name = draw(_value(key, overrides))
        if value.message_type is not None:
            target[name].SetInParent()
            _fill(draw, target[name], overrides, max_fields, depth - 1)
        else:
            target[name] = draw(_value(value, overrides))


def _value(field: FieldDescriptor, overrides: Overrides) -> st.SearchStrategy[Any]:
    if field.full_name in overrides:
        return overrides[field.full_name]
    kind = field.cpp_type
    if kind in _INTEGERS:
        low, high = _INTEGERS[kind]
        return st.one_of(st.integers(max(low, -2), 9), st.sampled_from([low, high]), st.integers(low, high))
    if kind == FieldDescriptor.CPPTYPE_BOOL:
        return st.booleans()
    if kind in (FieldDescriptor.CPPTYPE_FLOAT, FieldDescriptor.CPPTYPE_DOUBLE):
        return st.floats(width=32)
    if kind == FieldDescriptor.CPPTYPE_ENUM:
        return st.sampled_from([value.number for value in field.enum_type.values])
    if field.type == FieldDescriptor.TYPE_BYTES:
        return st.binary(max_size=16)
    return st.one_of(st.sampled_from(["", "IN", "OUT", "1", "-1", "a", "../x", "\0"]), st.text(max_size=6))

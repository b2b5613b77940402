"""Random JSON schemas like those that clients write."""

from __future__ import annotations

import random
from typing import Any

_NAMES = ["id", "name", "größe", "a b", 'quo"te', "x-y", "日本", "tags", "items", "n", "back\\slash"]
_PATTERNS = [
    "^[a-z]{2,5}$",
    "^[A-Z][a-z]*$",
    "[0-9]+",
    "^(foo|bar|baz)-\\d{1,3}$",
    "^\\w+@\\w+\\.com$",
    "^$|^x+$",
]
_FORMATS = ["date", "time", "date-time", "uuid", "ipv4", "ipv6", "email", "uri", "hostname"]


def random_schema(seed: int, depth: int = 3) -> dict[str, Any]:
    """Return the schema with this number: deterministic, and always satisfiable."""
    rng = random.Random(seed)
    schema = _Maker(rng).make(depth)
    if rng.random() < 0.2:
        node = {
            "type": "object",
            "properties": {"value": schema, "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}},
            "required": ["value", "next"],
            "additionalProperties": False,
        }
        return {"$defs": {"node": node}, "$ref": "#/$defs/node"}
    return schema


class _Maker:
    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def make(self, depth: int) -> dict[str, Any]:
        leaves = [self.string, self.integer, self.number, self.enumeration, self.constant, self.simple]
        inner = [self.object, self.object, self.array, self.tuple, self.any_of, self.all_of]
        return self._rng.choice(leaves if depth == 0 else leaves[:3] + inner)(depth)

    def string(self, depth: int) -> dict[str, Any]:
        rng = self._rng
        match rng.randrange(4):
            case 0:
                low = rng.randrange(6)
                return {"type": "string", "minLength": low, "maxLength": low + rng.randrange(8)}
            case 1:
                return {"type": "string", "pattern": rng.choice(_PATTERNS)}
            case 2:
                return {"type": "string", "format": rng.choice(_FORMATS)}
            case _:
                return {"type": "string", "maxLength": rng.randrange(20)}

    def integer(self, depth: int) -> dict[str, Any]:
        rng = self._rng
        low = rng.randrange(-1000, 1000)
        schema: dict[str, Any] = {"type": "integer"}
        if rng.random() < 0.7:
            schema[rng.choice(["minimum", "exclusiveMinimum"])] = low
        if rng.random() < 0.7:
            schema[rng.choice(["maximum", "exclusiveMaximum"])] = low + rng.randrange(2, 500)
        if rng.random() < 0.2:
            return {"type": "integer", "multipleOf": rng.randrange(2, 12)}
        return schema

    def number(self, depth: int) -> dict[str, Any]:
        rng = self._rng
        low = round(rng.uniform(-50, 50), rng.randrange(3))
        schema: dict[str, Any] = {"type": "number"}
        if rng.random() < 0.7:
            schema[rng.choice(["minimum", "exclusiveMinimum"])] = low
        if rng.random() < 0.7:
            schema[rng.choice(["maximum", "exclusiveMaximum"])] = low + rng.randrange(1, 100)
        return schema

    def simple(self, depth: int) -> dict[str, Any]:
        return {"type": self._rng.choice(["boolean", "null", ["integer", "null"], ["boolean", "integer"]])}

    def enumeration(self, depth: int) -> dict[str, Any]:
        values = ["a", "ab", "é\n", 1, 2.5, None, True, [1, "x"], {"k": 0}, '"', ""]
        return {"enum": self._rng.sample(values, self._rng.randrange(1, 5))}

    def constant(self, depth: int) -> dict[str, Any]:
        return {"const": self._rng.choice(["fixed", 7, [1, 2], {"a": None}, "\t", "😀"])}

    def object(self, depth: int) -> dict[str, Any]:
        rng = self._rng
        names = rng.sample(_NAMES, rng.randrange(1, 5))
        schema: dict[str, Any] = {
            "type": "object",
            "properties": {name: self.make(depth - 1) for name in names},
            "required": [name for name in names if rng.random() < 0.7],
        }
        match rng.randrange(4):
            case 0:
                schema["additionalProperties"] = self.make(0)
            case 1:
                pass
            case _:
                schema["additionalProperties"] = False
        return schema

    def array(self, depth: int) -> dict[str, Any]:
        rng = self._rng
        schema: dict[str, Any] = {"type": "array", "items": self.make(depth - 1)}
        if rng.random() < 0.7:
            schema["minItems"] = rng.randrange(3)
        if rng.random() < 0.7:
            schema["maxItems"] = schema.get("minItems", 0) + rng.randrange(1, 4)
        return schema

    def tuple(self, depth: int) -> dict[str, Any]:
        items = [self.make(depth - 1) for _ in range(self._rng.randrange(1, 4))]
        return {"type": "array", "prefixItems": items, "items": False, "minItems": len(items)}

    def any_of(self, depth: int) -> dict[str, Any]:
        return {"anyOf": [self.make(depth - 1) for _ in range(self._rng.randrange(2, 4))]}

    def all_of(self, depth: int) -> dict[str, Any]:
        whole = self.object(depth)
        first, *rest = whole["properties"].items()
        common = {key: value for key, value in whole.items() if key == "type"}
        return {
            "allOf": [
                {**common, "properties": dict([first]), "required": whole["required"]},
                {**common, "properties": dict(rest)},
            ]
        }

"""Pages of a response's input items."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from neso.frontends.openai.errors import invalid
from neso.frontends.openai.responses.conversation import Item


def item_page(items: Sequence[Item], query: Mapping[str, str]) -> dict[str, Any]:
    """A page of `items`: `limit` of them (1 to 100), newest first unless `order` is asc, those behind `after`.

    Raises `ApiError`.
    """
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise invalid("order", f"'order' must be 'asc' or 'desc', got {order!r}.")
    limit = query.get("limit", "20")
    if not (limit.isdecimal() and len(limit) <= 3 and 1 <= int(limit) <= 100):
        raise invalid("limit", f"'limit' must be an integer from 1 to 100, got {limit!r}.")
    ordered = list(items) if order == "asc" else list(reversed(items))
    after = query.get("after")
    start = 0
    if after is not None:
        start = next((i + 1 for i, item in enumerate(ordered) if item["id"] == after), -1)
        if start < 0:
            raise invalid("after", f"'after' is the id of no item: {after!r}.")
    page = ordered[start : start + int(limit)]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": start + len(page) < len(ordered),
    }

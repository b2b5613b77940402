"""Request routing by method and path."""

from __future__ import annotations

from collections.abc import Awaitable
from dataclasses import dataclass, field

from neso.frontends.transport.http1.messages import (
    Handler,
    HandlerResult,
    PendingResponse,
    Request,
    Response,
    decode_path,
    error_response,
)

_MAX_CACHED_PATHS = 1024


@dataclass(slots=True)
class _Node:
    """Node of the pattern tree, one level per path segment: literal children and at most one variable of each kind."""

    literals: dict[bytes, _Node] = field(default_factory=dict)
    digits: tuple[str, _Node] | None = None
    variable: tuple[str, _Node] | None = None
    handlers: dict[str, Handler] = field(default_factory=dict)
    mounted: Handler | None = None


class Router:
    """A handler that dispatches to other handlers by method and path.

    A pattern's segment is a literal, `{name}` (any non-empty text) or `{name:digits}`. Literals take precedence over
    variables. `request.params` holds the variables, percent-decoded after the path was split, so that a value may
    contain "%2F"; handlers must not modify it. HEAD requests go to the handler of GET.
    """

    def __init__(self) -> None:
        self._root = _Node()
        self._cache: dict[bytes, tuple[_Node, dict[str, str]]] = {}  # by path; clients use few distinct paths

    def add(self, method: str, pattern: str, handler: Handler) -> None:
        """Route `method` on paths that match `pattern` to `handler`."""
        self._node(pattern).handlers[method] = handler

    def mount(self, prefix: str, handler: Handler) -> None:
        """Route every path at or below `prefix` that no pattern matches to `handler`; the path is not rewritten."""
        self._node(prefix.rstrip("/")).mounted = handler

    def __call__(self, request: Request) -> Response | PendingResponse | Awaitable[HandlerResult]:
        cached = self._cache.get(request.raw_path)
        if cached is not None:
            node, params = cached
        else:
            params = {}
            segments = request.raw_path.split(b"/")
            found = _find(self._root, segments, 1, params)
            if found is None:
                mounted = self._mounted(segments)
                return error_response(404, "Not Found") if mounted is None else mounted(request)
            node = found
            if len(self._cache) == _MAX_CACHED_PATHS:
                self._cache.clear()
            self._cache[request.raw_path] = node, params
        method = "GET" if request.method == "HEAD" else request.method
        handler = node.handlers.get(method)
        if handler is None:
            return error_response(405, "Method Not Allowed", (("allow", ", ".join(sorted(node.handlers))),))
        request.params = params
        return handler(request)

    def _mounted(self, segments: list[bytes]) -> Handler | None:
        """Return the handler mounted at the longest prefix of the path."""
        node: _Node | None = self._root
        found = self._root.mounted
        for segment in segments[1:]:
            node = node.literals.get(segment) if node is not None else None
            if node is None:
                break
            found = node.mounted or found
        return found

    def _node(self, pattern: str) -> _Node:
        self._cache.clear()
        node = self._root
        for segment in pattern.split("/")[1:]:
            if not segment.startswith("{"):
                node = node.literals.setdefault(segment.encode(), _Node())
            elif segment.endswith(":digits}"):
                if node.digits is None:
                    node.digits = (segment[1 : -len(":digits}")], _Node())
                node = node.digits[1]
            else:
                if node.variable is None:
                    node.variable = (segment[1:-1], _Node())
                node = node.variable[1]
        return node


def _find(node: _Node, segments: list[bytes], at: int, params: dict[str, str]) -> _Node | None:
    """Find the node that matches `segments[at:]`: literals first, then variables."""
    if at == len(segments):
        return node if node.handlers else None
    segment = segments[at]
    child = node.literals.get(segment)
    if child is not None:
        found = _find(child, segments, at + 1, params)
        if found is not None:
            return found
    for variable in (node.digits, node.variable):
        if variable is None or not segment or (variable is node.digits and not segment.isdigit()):
            continue
        found = _find(variable[1], segments, at + 1, params)
        if found is not None:
            params[variable[0]] = decode_path(segment)
            return found
    return None

"""Which handler answers which method and path."""

from __future__ import annotations

from collections.abc import Awaitable
from dataclasses import dataclass, field

from neso.frontends.http.deferred import DeferredResponse
from neso.frontends.http.handler import Answer, Handler
from neso.frontends.http.request import Request, decode_path
from neso.frontends.http.response import Response, error_response

_MOST_REMEMBERED = 1024


@dataclass(slots=True)
class _Node:
    """A path segment in the tree of patterns: literal children, and at most one of each kind of variable."""

    literals: dict[bytes, _Node] = field(default_factory=dict)
    digits: tuple[str, _Node] | None = None
    variable: tuple[str, _Node] | None = None
    handlers: dict[str, Handler] = field(default_factory=dict)
    mounted: Handler | None = None


class Router:
    """Dispatches by method and path; is itself a handler.

    A pattern's segment is literal, `{name}` (anything but empty) or `{name:digits}`; what variables match is
    in `request.params`, percent-decoded after the path was split, so that a name may hold "%2F". Literals win
    over variables. HEAD is answered by the handler of GET. Handlers must not change `request.params`.
    """

    def __init__(self) -> None:
        self._root = _Node()
        self._remembered: dict[bytes, tuple[_Node, dict[str, str]]] = {}  # by path: clients ask for few

    def add(self, method: str, pattern: str, handler: Handler) -> None:
        """Let `handler` answer `method` on paths like `pattern`."""
        self._grow(pattern).handlers[method] = handler

    def mount(self, prefix: str, handler: Handler) -> None:
        """Let `handler` answer all at `prefix` and below that no pattern matches, with the path unchanged."""
        self._grow(prefix.rstrip("/")).mounted = handler

    def __call__(self, request: Request) -> Response | DeferredResponse | Awaitable[Answer]:
        remembered = self._remembered.get(request.raw_path)
        if remembered is not None:
            node, params = remembered
        else:
            params = {}
            segments = request.raw_path.split(b"/")
            found = _find(self._root, segments, 1, params)
            if found is None:
                mounted = self._mounted(segments)
                return error_response(404, "Not Found") if mounted is None else mounted(request)
            node = found
            if len(self._remembered) == _MOST_REMEMBERED:
                self._remembered.clear()
            self._remembered[request.raw_path] = node, params
        method = "GET" if request.method == "HEAD" else request.method
        handler = node.handlers.get(method)
        if handler is None:
            return error_response(405, "Method Not Allowed", (("allow", ", ".join(sorted(node.handlers))),))
        request.params = params
        return handler(request)

    def _mounted(self, segments: list[bytes]) -> Handler | None:
        """The handler mounted at the longest prefix of the path."""
        node: _Node | None = self._root
        found = self._root.mounted
        for segment in segments[1:]:
            node = node.literals.get(segment) if node is not None else None
            if node is None:
                break
            found = node.mounted or found
        return found

    def _grow(self, pattern: str) -> _Node:
        self._remembered.clear()
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
    """The node of a pattern that matches `segments[at:]`; literals first, then the variables."""
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

"""Which handler answers which path.

A path is cut at its slashes *before* it is decoded, so a percent-encoded slash is part of a name. ``{rest}``, at
the end of a pattern only, takes everything that is left, empty or with slashes: record keys are any bytes.
"""

from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from urllib.parse import unquote_to_bytes

from aiohttp import web

from firn.errors import NotFound
from firn_node.security.decision import Action
from firn_node.server.answers import MethodNotAllowed
from firn_node.server.context import Context
from firn_node.server.params import Call

Handler = Callable[[Context, Call], Awaitable[web.StreamResponse]]


@dataclass(frozen=True, slots=True)
class Route:
    """``action``: what a caller must be allowed to, on the topic that the path names if it names one."""

    method: str
    pattern: str
    handler: Handler
    action: Action


@dataclass(slots=True)
class _Node:
    fixed: "dict[bytes, _Node]" = field(default_factory=dict)
    variable: "_Node | None" = None
    names: dict[str, Route] = field(default_factory=dict)  # method -> route
    rest: dict[str, Route] = field(default_factory=dict)


class Router:
    def __init__(self, routes: list[Route]) -> None:
        self.routes = routes
        self._root = _Node()
        for route in routes:
            self._add(route)

    def _add(self, route: Route) -> None:
        node = self._root
        *parts, last = route.pattern.strip("/").split("/")
        for part in [*parts, last]:
            if part == "{rest}":
                node.rest[route.method] = route
                return
            if part.startswith("{"):
                node.variable = node.variable or _Node()
                node = node.variable
            else:
                node = node.fixed.setdefault(part.encode(), _Node())
        node.names[route.method] = route

    def find(self, method: str, path: bytes) -> tuple[Route, dict[str, bytes]]:
        """The route and the decoded variable parts.

        Errors: NotFound, MethodNotAllowed (with the methods there are).
        """
        methods, values = self._walk(path.removeprefix(b"/").split(b"/"))
        route = methods.get(method) or (methods.get("GET") if method == "HEAD" else None)
        if route is None:
            allowed = sorted(methods)
            shown = path[:200].decode("utf-8", "replace")
            if not methods:
                raise NotFound(f"no such path: {shown}")
            raise MethodNotAllowed(
                f"{method[:32]} is not for {shown}; use {' or '.join(allowed)}", allowed=allowed
            )
        return route, dict(zip(_variables(route.pattern), values, strict=True))

    def _walk(self, segments: list[bytes]) -> tuple[dict[str, Route], list[bytes]]:
        node = self._root
        values: list[bytes] = []
        for at, segment in enumerate(segments):
            if node.rest:
                return node.rest, [*values, unquote_to_bytes(b"/".join(segments[at:]))]
            if segment in node.fixed:
                node = node.fixed[segment]
            elif node.variable is not None and segment:
                node = node.variable
                values.append(unquote_to_bytes(segment))
            else:
                return {}, []
        return node.names, values


def _variables(pattern: str) -> Iterator[str]:
    return (part[1:-1] for part in pattern.split("/") if part.startswith("{"))

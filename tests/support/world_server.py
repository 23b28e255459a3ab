"""The Kubernetes in memory of ``operator_kit``, spoken to over HTTP: for kopf and the operator's own client, with faults.

``serving`` answers requests, tells watches, and lets the world turn. Faults, by counting and not by chance:

- ``conflicts``: of every so many writes one is answered 409;
- ``failures``: of every so many requests one is answered 429 or 500;
- ``watch_events``: a watch ends with 410 after so many events, and what comes in one batch comes backwards;
- ``broken_watches``: so many watches are told of an internal error within their stream;
- ``silent``: the first watch of a kind tells nothing and does not end.
"""

import asyncio
import contextlib
import copy
import json
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import yaml
from aiohttp import web
from operator_kit import World

from firn.errors import Conflict, FirnError, NotFound
from firn_operator.kube import KINDS, VOLUME, Kind, Obj
from firn_operator.observe import version_of

TURN_S = 0.02
_PATH = re.compile(
    r"/(?:api|apis)/(?P<version>(?:[^/]+/)?v[^/]+)(?:/namespaces/(?P<namespace>[^/]+))?/(?P<plural>[^/]+)"
    r"(?:/(?P<name>[^/]+))?(?:/(?P<sub>status|eviction))?"
)
_KINDS = (*KINDS.values(), VOLUME, Kind("v1", "Namespace", "namespaces", False))


@dataclass(slots=True)
class Faults:
    conflicts: int = 0
    failures: int = 0
    watch_events: int = 0
    broken_watches: int = 0
    silent: frozenset[str] = frozenset()


@dataclass(slots=True, eq=False)
class _Watcher:
    kind: Kind
    labels: dict[str, str]
    events: "asyncio.Queue[list[Obj]]" = field(default_factory=asyncio.Queue)
    is_silent: bool = False

    def of(self, changed: list[tuple[str, Obj]]) -> list[Obj]:
        """The events of these that it is to be told of."""
        return [
            {"type": what, "object": obj} for what, obj in changed
            if obj["kind"] == self.kind.kind and self.labels.items() <= (obj["metadata"].get("labels") or {}).items()
        ]  # fmt: skip


class WorldServer:
    def __init__(self, world: World, faults: Faults | None = None) -> None:
        self.world = world
        self.faults = faults or Faults()
        self.refused = 0  # requests answered by a fault
        self.heard = 0  # events that reached the operator by a watch
        self.watches_ended = self.watches_broken = 0
        self._asked = self._writes = 0
        self._watchers: list[_Watcher] = []
        self._silenced: set[str] = set()
        self._known: dict[tuple[str, str, str], Obj] = {}
        self._history: list[tuple[str, Obj]] = []
        self._published()

    # What watches are told.

    def _published(self) -> list[tuple[str, Obj]]:
        """What has changed since the last call."""
        now, before = dict(self.world.objects), self._known
        changed = []
        for key, obj in now.items():
            old = before.get(key)
            if old is None or old["metadata"]["uid"] != obj["metadata"]["uid"]:
                if old is not None:
                    changed.append(("DELETED", self._last_of(old)))
                changed.append(("ADDED", obj))
            elif old["metadata"]["resourceVersion"] != obj["metadata"]["resourceVersion"]:
                changed.append(("MODIFIED", obj))
        changed += [("DELETED", self._last_of(old)) for key, old in before.items() if key not in now]
        self._known = now
        return sorted(changed, key=lambda pair: version_of(pair[1]))

    def _last_of(self, obj: Obj) -> Obj:
        self.world.version += 1
        return {**obj, "metadata": {**obj["metadata"], "resourceVersion": str(self.world.version)}}

    def publish(self) -> None:
        changed = copy.deepcopy(self._published())
        self._history += changed
        for watcher in self._watchers:
            batch = watcher.of(changed)
            if batch and not watcher.is_silent:
                watcher.events.put_nowait(batch)

    def end_watches(self) -> None:
        for watcher in self._watchers:
            watcher.events.put_nowait([])

    # Requests.

    async def answer(self, request: web.Request) -> web.StreamResponse:
        if (found := _discovered(request.path)) is not None:
            return web.json_response(found)
        match = _PATH.fullmatch(request.path)
        kind = next((each for each in _KINDS if match and _is_at(each, match)), None)
        if match is None or kind is None:
            return _status(404, f"{request.path} names nothing")
        if request.query.get("watch"):
            return await self._watch(request, kind)
        is_write = request.method != "GET"
        self._asked += 1
        self._writes += is_write
        if self.faults.conflicts and is_write and self._writes % self.faults.conflicts == 0:
            self.refused += 1
            return _status(409, "changed meanwhile")
        if self.faults.failures and self._asked % self.faults.failures == 0:
            self.refused += 1
            return _status(429 if self.refused % 2 else 500, "not now")
        try:
            found = await self._serve(request, kind, match)
        except Conflict as error:
            return _status(409, error.message)
        except NotFound as error:
            return _status(404, error.message)
        except FirnError as error:
            return _status(503, error.message)
        self.publish()
        return _status(404, f"no {kind.kind}") if found is None else web.json_response(found)

    async def _serve(self, request: web.Request, kind: Kind, match: re.Match[str]) -> Obj | None:
        namespace, name, sub = match["namespace"] or "", match["name"] or "", match["sub"] or ""
        text = await request.text()
        body: Obj = json.loads(text) if text else {}
        world = self.world
        if request.method == "GET" and not name:
            items = await world.list(kind, namespace or None, selector=request.query.get("labelSelector", ""))
            return {"metadata": {"resourceVersion": str(world.version)}, "items": items}
        if request.method == "GET":
            return await world.get(kind, namespace, name)
        if sub == "eviction":
            if not await world.evict(namespace, name, body["deleteOptions"]["preconditions"]["uid"]):
                raise Conflict("the budget allows none now")
            return {}
        if request.method == "POST":
            return await world.create(kind, namespace, body)
        if request.method == "DELETE":
            uid = (body.get("preconditions") or {}).get("uid")
            orphan = body.get("propagationPolicy") == "Orphan"
            await world.delete(kind, namespace, name, uid=uid, orphan=orphan)
            return {}
        if request.content_type == "application/merge-patch+json":
            return await world.patch(kind, namespace, name, body)
        return await world.apply(kind, namespace, body, sub=sub)

    async def _watch(self, request: web.Request, kind: Kind) -> web.StreamResponse:
        since = int(request.query.get("resourceVersion", "0"))
        labels = dict(
            pair.split("=", 1) for pair in request.query.get("labelSelector", "").split(",") if pair
        )
        watcher = _Watcher(kind, labels)
        if kind.kind in self.faults.silent - self._silenced:
            watcher.is_silent = True
            self._silenced.add(kind.kind)
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        if late := watcher.of([(what, obj) for what, obj in self._history if version_of(obj) > since]):
            watcher.events.put_nowait(late)
        self._watchers.append(watcher)
        told = 0
        try:
            while True:
                batch = await watcher.events.get()
                if not batch:
                    return response
                if watcher.is_silent:
                    continue
                told += len(batch)
                if self.watches_broken < self.faults.broken_watches:
                    self.watches_broken += 1
                    await response.write(_line(_error(500)))
                    return response
                for event in reversed(batch) if self.faults.watch_events else batch:
                    await response.write(_line(event))
                if self.faults.watch_events and told >= self.faults.watch_events:
                    self.watches_ended += 1
                    await response.write(_line(_error(410)))
                    return response
        except ConnectionError:
            return response
        finally:
            self._watchers.remove(watcher)


@contextlib.asynccontextmanager
async def serving(server: WorldServer) -> AsyncIterator[str]:
    """The server's URL; meanwhile the world turns."""
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", server.answer)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    turning = asyncio.create_task(_turn(server))
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        turning.cancel()
        await asyncio.gather(turning, return_exceptions=True)
        await runner.cleanup()


async def _turn(server: WorldServer) -> None:
    while True:
        await asyncio.sleep(TURN_S)
        server.world.turn()
        server.publish()


def kubeconfig(folder: Path, url: str) -> Path:
    document = {
        "apiVersion": "v1", "kind": "Config", "current-context": "test",
        "clusters": [{"name": "test", "cluster": {"server": url}}],
        "users": [{"name": "test", "user": {"token": "test"}}],
        "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test", "namespace": "shop"}}],
    }  # fmt: skip
    path = folder / "kubeconfig"
    path.write_text(yaml.safe_dump(document))
    return path


def _is_at(kind: Kind, match: re.Match[str]) -> bool:
    return (kind.api_version, kind.plural) == (match["version"], match["plural"])


def _discovered(path: str) -> Obj | None:
    """The documents by which clients find out what is served."""
    versions = sorted({kind.api_version for kind in _KINDS if "/" in kind.api_version})
    if path == "/version":
        return {"major": "1", "minor": "34"}
    if path == "/api":
        return {"versions": ["v1"]}
    if path == "/apis":
        return {"groups": [_group(each) for each in versions]}
    wanted = path.removeprefix("/apis/").removeprefix("/api/")
    kinds = [kind for kind in _KINDS if kind.api_version == wanted]
    if not kinds:
        return None
    return {"resources": [_resource(kind) for kind in kinds]}


def _group(version: str) -> Obj:
    name, _, number = version.partition("/")
    found = {"groupVersion": version, "version": number}
    return {"name": name, "versions": [found], "preferredVersion": found}


def _resource(kind: Kind) -> Obj:
    return {
        "name": kind.plural, "singularName": kind.kind.lower(), "kind": kind.kind, "namespaced": kind.is_namespaced,
        "verbs": ["get", "list", "watch", "create", "patch", "delete"],
    }  # fmt: skip


def _status(code: int, message: str) -> web.Response:
    body = {"kind": "Status", "status": "Failure", "code": code, "message": message}
    return web.json_response(body, status=code)


def _error(code: int) -> Obj:
    return {"type": "ERROR", "object": {"kind": "Status", "code": code, "message": "a fault of the test"}}


def _line(event: Obj) -> bytes:
    return json.dumps(event).encode() + b"\n"

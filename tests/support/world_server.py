"""The world of the operator's tests behind HTTP, as an API server serves it: for the operator as a process runs it.

The server has a thread and a loop of its own, because kopf ends every task of its loop that began after it. Everything that
touches the `World` runs in that loop: requests, its turns, and what a test asks for by `Served.ask`.

Faults are those of `Faults`: statuses in place of an answer, answers that say 500 of what was done, and watches that are
silent, end with 410 after every event, repeat what is old, or break for good.
"""

import asyncio
import contextlib
import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, TypeVar

import yaml
from aiohttp import web
from operator_kit import World

from firn.errors import Conflict, FirnError, Invalid
from firn_operator import kube
from firn_operator.kube import EVENT, LEASE, Kind, Obj, name_of, namespace_of

T = TypeVar("T")
TURN_S = 0.1
KINDS = {(kind.api_version, kind.plural): kind for kind in (*kube.KINDS.values(), kube.VOLUME)}
# kopf waits until these two are served before it watches anything, though it never asks for one of them.
ALSO = (
    Kind("v1", "Namespace", "namespaces", is_namespaced=False),
    Kind(
        "apiextensions.k8s.io/v1",
        "CustomResourceDefinition",
        "customresourcedefinitions",
        is_namespaced=False,
    ),
)
Watch = Literal["sound", "silent", "gone", "repeating", "failed", "garbled", "refused"]


@dataclass(slots=True)
class Faults:
    """``status``: in place of an answer, given whether the request writes; 0: none. ``after``: say 500 of what is done."""

    status: Callable[[bool], int] = lambda is_write: 0
    after: Callable[[], bool] = lambda: False
    watch: Watch = "sound"
    watched: str = ""  # the kind whose watches are so; empty: all


@dataclass(frozen=True, slots=True)
class Told:
    version: int
    type: str
    kind: str
    obj: Obj


@dataclass(slots=True)
class Write:
    """A write of the operator as it was answered."""

    place: str  # kind, name and part
    status: int
    is_new: bool  # it changed what is stored


class HeardWorld(World):
    """A world that remembers what happened, for watches."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[Told] = []
        self.listeners: set[asyncio.Event] = set()

    def put(self, obj: Obj) -> Obj:
        key = (obj["kind"], namespace_of(obj), name_of(obj))
        old = self.objects.get(key)
        stored = super().put(obj)
        now = self.objects.get(key)
        if now is not old:
            self._tell("DELETED" if now is None else "ADDED" if old is None else "MODIFIED", stored)
        return stored

    def remove(self, kind: Kind, name: str, namespace: str = "shop") -> None:
        old = self.find(kind, name, namespace)
        super().remove(kind, name, namespace)
        if old is not None:
            self.version += 1
            meta = {**old["metadata"], "resourceVersion": str(self.version)}
            self._tell("DELETED", {**old, "metadata": meta})

    def turn(self) -> None:
        super().turn()
        self.now = datetime.now(UTC)  # the operator's own clock

    def _tell(self, type_: str, obj: Obj) -> None:
        self.told.append(Told(self.version, type_, obj["kind"], json.loads(json.dumps(obj))))
        for event in self.listeners:
            event.set()


@dataclass
class Served:
    """A world that is being served."""

    world: HeardWorld
    faults: Faults
    kubeconfig: Path
    loop: asyncio.AbstractEventLoop
    writes: list[Write] = field(default_factory=list)
    asked: Counter[str] = field(default_factory=Counter)
    watching: int = 0  # how often the watches were broken

    def ask(self, question: Callable[[World], T]) -> T:
        """The answer to a question about the world, or what came of a change of it."""

        async def answer() -> T:
            return question(self.world)

        return asyncio.run_coroutine_threadsafe(answer(), self.loop).result(30)

    def break_watches(self, how: Watch, kind: Kind) -> None:
        """Let all that are open end, and those of a kind that come be as told."""

        def end(world: World) -> None:
            self.faults.watch, self.faults.watched = how, kind.kind
            self.watching += 1
            for event in self.world.listeners:
                event.set()

        self.ask(end)

    def of_resources(self) -> list[Write]:
        """Writes of anything but Events and Leases."""
        return [each for each in self.writes if not each.place.startswith(("Event ", "Lease "))]


@contextlib.contextmanager
def served(world: HeardWorld, faults: Faults, folder: Path) -> Iterator[Served]:
    """Serve a world, which takes its turns meanwhile, until the end of the ``with``."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="world", daemon=True)
    thread.start()
    shown = Served(world, faults, folder / "kubeconfig", loop)
    server = _Server(shown)
    try:
        port = asyncio.run_coroutine_threadsafe(server.start(), loop).result(30)
        shown.kubeconfig.write_text(_kubeconfig(port))
        yield shown
    finally:
        asyncio.run_coroutine_threadsafe(server.stop(), loop).result(30)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(30)
        loop.close()


def _kubeconfig(port: int) -> str:
    return yaml.safe_dump({
        "apiVersion": "v1", "kind": "Config", "current-context": "world",
        "clusters": [{"name": "world", "cluster": {"server": f"http://127.0.0.1:{port}"}}],
        "users": [{"name": "world", "user": {"token": "operator"}}],
        "contexts": [{"name": "world", "context": {"cluster": "world", "user": "world"}}],
    })  # fmt: skip


class _Server:
    def __init__(self, shown: Served) -> None:
        self._shown, self._world, self._faults = shown, shown.world, shown.faults
        self._turns: asyncio.Task[None] | None = None
        self._runner: web.AppRunner | None = None

    async def start(self) -> int:
        app = web.Application()
        app.router.add_get("/api", _core)
        app.router.add_get("/apis", _groups)
        app.router.add_get("/api/v1", _resources)
        app.router.add_get("/apis/{group}/{version}", _resources)
        for root in ("/api/{version}", "/apis/{group}/{version}"):
            for space in ("/namespaces/{namespace}", ""):
                for rest in ("/{plural}", "/{plural}/{name}", "/{plural}/{name}/{part}"):
                    app.router.add_route("*", root + space + rest, self._answer)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1, handler_cancellation=True)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self._turns = asyncio.create_task(self._take_turns())
        return int(self._runner.addresses[0][1])

    async def stop(self) -> None:
        assert self._turns is not None
        assert self._runner is not None
        self._turns.cancel()
        await asyncio.gather(self._turns, return_exceptions=True)
        await self._runner.cleanup()

    async def _take_turns(self) -> None:
        while True:
            self._world.turn()
            await asyncio.sleep(TURN_S)

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        found = request.match_info
        group, version = found.get("group"), found["version"]
        kind = KINDS.get((f"{group}/{version}" if group else version, found["plural"]))
        if kind is None:
            return _status(404, f"there are no {found['plural']}")
        if request.method == "GET" and request.query.get("watch"):
            return await self._watch(request, kind)
        text = await request.text()
        is_write = request.method != "GET"
        self._shown.asked[request.method] += 1
        status, is_new = self._faults.status(is_write), False
        if status:
            answer = _status(status, "a fault of the test")
        else:
            before = self._world.version
            answer = await self._serve(request, kind, json.loads(text) if text else {})
            is_new = self._world.version != before
            if is_write and self._faults.after():
                answer = _status(500, "it is done, and this does not say so")
        if is_write:
            name = found.get("name") or name_of(json.loads(text))
            place = " ".join(filter(None, (kind.kind, name, found.get("part"))))
            self._shown.writes.append(Write(place, answer.status, is_new))
        return answer

    async def _serve(self, request: web.Request, kind: Kind, body: Obj) -> web.Response:
        found, world = request.match_info, self._world
        namespace, name = found.get("namespace", ""), found.get("name", "")
        try:
            if request.method == "GET" and not name:
                items = await world.list(
                    kind, namespace or None, selector=request.query.get("labelSelector", "")
                )
                return web.json_response(
                    {"metadata": {"resourceVersion": str(world.version)}, "items": items}
                )
            if request.method == "GET":
                return _found(await world.get(kind, namespace, name))
            if request.method == "DELETE":
                uid = (body.get("preconditions") or {}).get("uid")
                orphan = body.get("propagationPolicy") == "Orphan"
                await world.delete(kind, namespace, name, uid=uid, orphan=orphan)
                return web.json_response({"kind": "Status", "status": "Success"})
            if found.get("part") == "eviction":
                is_gone = await world.evict(namespace, name, body["deleteOptions"]["preconditions"]["uid"])
                return _status(201 if is_gone else 429, "eviction")
            if request.method == "POST":
                return web.json_response(await world.create(kind, namespace, body), status=201)
            if request.content_type.endswith("apply-patch+yaml"):
                return _found(await world.apply(kind, namespace, body, sub=found.get("part", "")))
            return _found(await world.patch(kind, namespace, name, body))
        except Conflict as error:
            return _status(409, error.message)
        except FirnError as error:
            return _status(422 if isinstance(error, Invalid) else 500, error.message)

    # Watches.

    async def _watch(self, request: web.Request, kind: Kind) -> web.StreamResponse:
        is_meant = self._faults.watched in ("", kind.kind)
        mode = self._faults.watch if is_meant else "sound"
        if mode == "refused":
            return _status(410, "too old resource version")
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        since, heard = int(request.query.get("resourceVersion") or 0), asyncio.Event()
        self._world.listeners.add(heard)
        try:
            for line in _broken(mode):
                await response.write(line)
            async for told in self._following(request, kind, since, heard):
                if mode == "silent":
                    continue
                if mode == "repeating":
                    for earlier in reversed(self._earlier(told)):
                        await response.write(_line(earlier.type, earlier.obj))
                await response.write(_line(told.type, told.obj))
                if mode == "gone":
                    await response.write(
                        _line("ERROR", {"kind": "Status", "code": 410, "message": "too old"})
                    )
                    break
        except ConnectionError:
            pass
        finally:
            self._world.listeners.discard(heard)
        return response

    async def _following(self, request: web.Request, kind: Kind, since: int, heard: asyncio.Event) -> Any:
        selector = request.query.get("labelSelector", "")
        labels = dict(pair.split("=", 1) for pair in selector.split(",") if pair)
        namespace, at = request.match_info.get("namespace", ""), 0
        broken = self._shown.watching
        while broken == self._shown.watching:
            heard.clear()
            while at < len(self._world.told):
                told = self._world.told[at]
                at += 1
                meta = told.obj["metadata"]
                if (
                    told.kind == kind.kind and told.version > since and namespace in ("", namespace_of(told.obj))
                    and labels.items() <= (meta.get("labels") or {}).items()
                ):  # fmt: skip
                    yield told
            await heard.wait()

    def _earlier(self, told: Told) -> list[Told]:
        """The two events before one that were of the same object."""
        uid = told.obj["metadata"]["uid"]
        same = [
            each for each in self._world.told
            if each.obj["metadata"]["uid"] == uid and each.version < told.version and each.type != "DELETED"
        ]  # fmt: skip
        return same[-2:]


def _broken(mode: Watch) -> list[bytes]:
    if mode == "failed":
        return [_line("ERROR", {"kind": "Status", "code": 500, "message": "etcd is away"})]
    return [b"this is no JSON\n"] if mode == "garbled" else []


def _line(type_: str, obj: Obj) -> bytes:
    return json.dumps({"type": type_, "object": obj}).encode() + b"\n"


def _found(obj: Obj | None) -> web.Response:
    return _status(404, "not found") if obj is None else web.json_response(obj)


def _status(code: int, message: str) -> web.Response:
    headers = {"Retry-After": "1"} if code == 429 else {}
    said = {"kind": "Status", "apiVersion": "v1", "code": code, "message": message, "metadata": {}}
    return web.json_response(said, status=code, headers=headers)


# What there is, as discovery tells it.


async def _core(_: web.Request) -> web.Response:
    return web.json_response({"kind": "APIVersions", "versions": ["v1"]})


async def _groups(_: web.Request) -> web.Response:
    known = sorted({kind.api_version for kind in (*KINDS.values(), *ALSO) if "/" in kind.api_version})
    groups = []
    for each in known:
        group, version = each.split("/")
        at = {"groupVersion": each, "version": version}
        groups.append({"name": group, "versions": [at], "preferredVersion": at})
    return web.json_response({"kind": "APIGroupList", "groups": groups})


async def _resources(request: web.Request) -> web.Response:
    served_at = request.path.removeprefix("/apis/").removeprefix("/api/")
    verbs = ["create", "delete", "get", "list", "patch", "update", "watch"]
    rows = [
        {
            "name": kind.plural, "singularName": kind.kind.lower(), "kind": kind.kind,
            "namespaced": kind.is_namespaced, "verbs": verbs,
        }
        for kind in (*KINDS.values(), *ALSO) if kind.api_version == served_at
    ]  # fmt: skip
    return web.json_response({"kind": "APIResourceList", "groupVersion": served_at, "resources": rows})


__all__ = ["EVENT", "LEASE", "Faults", "HeardWorld", "Served", "Write", "served"]

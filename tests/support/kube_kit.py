"""A Kubernetes API server in this process: objects in a dictionary, spoken to over real HTTP, with faults.

It knows what brokers and the operator rely on, and traps that cost time on a real one:

- a change that changes nothing leaves the ``resourceVersion`` as it was; a stale one is answered 409;
- ``/status`` changes the status of an object alone; of kinds of ``firn.dev`` nothing else does;
- server-side apply keeps for each field manager what it applied last, and takes back what it leaves out; maps are
  merged, ``conditions`` and ``members`` are lists of maps by a key, other lists are replaced as a whole;
- a watch begins after a ``resourceVersion``, tells what happened since, and ends with 410 when that is forgotten.

Faults: ``disturb`` is asked before each request and gives a fault's name (``FAULTS``), or None. ``mute`` lets watches
say nothing more, without ending; ``forget`` drops what watches would go on from; ``stop`` and ``start`` take it away
and bring it back at the same address.
"""

import asyncio
import contextlib
import copy
import json
import re
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web
from kubernetes.aio import config
from kubernetes.aio.client import Configuration

from firn_node.kubernetes.api import KubernetesApi, Object

# A status; applied, and never answered; never answered; the connection is cut before or after it is applied.
FAULTS = ("409", "410", "429", "500", "503", "apply and hang", "hang", "cut", "apply and cut")
_PATH = re.compile(
    r"/(?P<version>api/v1|apis/[^/]+/[^/]+)(/namespaces/(?P<namespace>[^/]+))?/(?P<kind>[^/]+)"
    r"(/(?P<name>[^/]+))?(/(?P<part>status))?"
)
_LIST_KEYS = {"conditions": "type", "members": "node", "compaction": "group"}


async def configuration_of(kubeconfig: Path) -> Configuration:
    """For connections to the real API server that a file names."""
    configuration = Configuration()
    configuration.retries = False
    await config.load_kube_config(str(kubeconfig), client_configuration=configuration, persist_config=False)
    return configuration


@dataclass(frozen=True, slots=True)
class Place:
    """What a path names."""

    version: str
    kind: str
    namespace: str
    name: str

    def holds(self, other: "Place") -> bool:
        """Whether a list of this place has the object at ``other``."""
        return (
            (self.version, self.kind) == (other.version, other.kind)
            and self.namespace in ("", other.namespace)
            and self.name in ("", other.name)
        )


@dataclass(slots=True)
class Watcher:
    place: Place
    labels: dict[str, str]
    events: "asyncio.Queue[Object | None]" = field(default_factory=asyncio.Queue)


@dataclass(slots=True)
class Asked:
    """A request as it came, for tests that count."""

    method: str
    path: str
    query: dict[str, str]
    body: Object | None
    token: str
    at: float = 0.0  # in time of the loop


class FakeKubernetes:
    def __init__(self) -> None:
        self.objects: dict[Place, Object] = {}
        self.asked: list[Asked] = []
        self.tokens: dict[str, Object] = {}  # token -> the status of its TokenReview
        self.disturb: Callable[[Asked], str | None] = lambda asked: None
        self.is_mute = False
        self._applied: dict[tuple[Place, str], Object] = {}
        self._history: list[tuple[int, str, Place, Object]] = []
        self._forgotten = 0
        self._number = 100
        self._watchers: list[Watcher] = []
        self._hanging: set[asyncio.Event] = set()
        self._runner: web.AppRunner | None = None
        self._port = 0

    # Life.

    async def start(self) -> None:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._answer)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1, handler_cancellation=True)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self._port)
        await site.start()
        self._port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        for event in self._hanging:
            event.set()
        for watcher in self._watchers:
            watcher.events.put_nowait(None)
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def api(self, token: str = "") -> KubernetesApi:
        """A connection of its own."""
        configuration = Configuration()
        configuration.host = self.url
        configuration.retries = False
        if token:
            configuration.api_key["BearerToken"] = f"bearer {token}"
        return KubernetesApi(configuration)

    def mute(self, is_mute: bool = True) -> None:
        self.is_mute = is_mute

    def forget(self) -> None:
        """End all watches with 410, and let none go on from before."""
        self._history.clear()
        self._forgotten = self._number = self._number + 1
        for watcher in self._watchers:
            watcher.events.put_nowait(_gone())

    # Objects, as tests see them.

    def put(self, path: str, document: Object) -> Object:
        """Store an object as it is, whatever was there."""
        place, _ = _place(path)
        found = copy.deepcopy(document)
        before = self.objects.get(place)
        metadata = found.setdefault("metadata", {})
        metadata["name"] = place.name
        if place.namespace:
            metadata["namespace"] = place.namespace
        metadata["uid"] = before["metadata"]["uid"] if before else f"uid-{self._number}"
        return self._store(place, found, before)

    def get(self, path: str) -> Object | None:
        return self.objects.get(_place(path)[0])

    def remove(self, path: str) -> None:
        place, _ = _place(path)
        self._tell("DELETED", place, self.objects.pop(place))

    def _store(self, place: Place, new: Object, before: Object | None) -> Object:
        if before is not None:
            new["metadata"]["resourceVersion"] = before["metadata"]["resourceVersion"]
            if new == before:
                return before
            if new.get("spec") != before.get("spec"):
                new["metadata"]["generation"] = before["metadata"].get("generation", 1) + 1
        else:
            new["metadata"].setdefault("generation", 1)
        self._number += 1
        new["metadata"]["resourceVersion"] = str(self._number)
        self.objects[place] = new
        self._tell("MODIFIED" if before else "ADDED", place, new)
        return new

    def _tell(self, kind: str, place: Place, document: Object) -> None:
        if kind == "DELETED":
            self._number += 1
            document = {
                **document,
                "metadata": {**document["metadata"], "resourceVersion": str(self._number)},
            }
        self._history.append((self._number, kind, place, copy.deepcopy(document)))
        for watcher in self._watchers:
            if watcher.place.holds(place) and _has_labels(document, watcher.labels):
                watcher.events.put_nowait({"type": kind, "object": copy.deepcopy(document)})

    # Requests.

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        text = await request.text()
        token = request.headers.get("Authorization", "").partition(" ")[2]
        body = json.loads(text) if text else None
        now = asyncio.get_running_loop().time()
        asked = Asked(request.method, request.path, dict(request.query), body, token, now)
        self.asked.append(asked)
        fault = self.disturb(asked)
        assert fault is None or fault in FAULTS
        if fault in ("hang", "cut"):
            return await self._no_answer(request, hangs=fault == "hang")
        if fault is not None and fault.isdigit():
            return _status(int(fault), "a fault of the test")
        response = await self._serve(request, body)
        if fault is not None:
            return await self._no_answer(request, hangs=fault == "apply and hang")
        return response

    async def _no_answer(self, request: web.Request, *, hangs: bool) -> web.StreamResponse:
        if hangs:
            event = asyncio.Event()
            self._hanging.add(event)
            await event.wait()
        assert request.transport is not None
        request.transport.abort()
        return web.Response()

    async def _serve(self, request: web.Request, body: Any) -> web.StreamResponse:
        if request.path.endswith("/tokenreviews") and request.method == "POST":
            return web.json_response({**body, "status": self.tokens.get(body["spec"]["token"], {})})
        try:
            place, part = _place(request.path)
        except LookupError as error:
            return _status(404, str(error))
        if request.method == "GET" and request.query.get("watch"):
            return await self._watch(request, place)
        if request.method == "GET":
            return self._read(request, place)
        if request.method == "POST":
            place = Place(place.version, place.kind, place.namespace, body["metadata"]["name"])
            if place in self.objects:
                return _status(409, f"{place.kind} {place.name} exists")
            return web.json_response(self.put(_path(place), body), status=201)
        before = self.objects.get(place)
        if before is None and not request.content_type.endswith("apply-patch+yaml"):
            return _status(404, f"{place.kind} {place.name} not found")
        if request.method == "DELETE":
            self.remove(request.path)
            return web.json_response({"kind": "Status", "status": "Success"})
        return self._change(request, place, part, before, body)

    def _change(
        self, request: web.Request, place: Place, part: str, before: Object | None, body: Any
    ) -> web.StreamResponse:
        wanted = (body.get("metadata") or {}).get("resourceVersion")
        if wanted is not None and before is not None and wanted != before["metadata"]["resourceVersion"]:
            return _status(409, f"{place.kind} {place.name}: the object has been modified")
        if request.method == "PUT":
            changed = copy.deepcopy(body)
        elif request.content_type == "application/merge-patch+json":
            changed = _merged(copy.deepcopy(before), body)
        elif request.content_type == "application/apply-patch+yaml":
            manager = request.query["fieldManager"]
            last = self._applied.get((place, manager), {})
            others = [each for (at, who), each in self._applied.items() if at == place and who != manager]
            changed = _applied(_without(copy.deepcopy(before or {}), last, body, others), body)
            self._applied[place, manager] = copy.deepcopy(body)
        else:
            return _status(415, request.content_type)
        if before is None:
            return web.json_response(self.put(_path(place), changed), status=201)
        changed["metadata"] = {
            **changed.get("metadata", {}),
            **{k: before["metadata"][k] for k in ("name", "uid", "resourceVersion")},
        }
        if part == "status":
            changed = {**copy.deepcopy(before), "status": changed.get("status")}
        elif place.version.startswith("apis/firn.dev") and "status" in before:
            changed["status"] = copy.deepcopy(before["status"])
        return web.json_response(self._store(place, changed, before))

    def _read(self, request: web.Request, place: Place) -> web.StreamResponse:
        if place.name:
            found = self.objects.get(place)
            if found is None:
                return _status(404, f"{place.kind} {place.name} not found")
            return web.json_response(found)
        selected, labels = _selected(place, request)
        items = [
            found
            for at, found in sorted(self.objects.items(), key=lambda pair: (pair[0].namespace, pair[0].name))
            if selected.holds(at) and _has_labels(found, labels)
        ]
        return web.json_response({"metadata": {"resourceVersion": str(self._number)}, "items": items})

    async def _watch(self, request: web.Request, place: Place) -> web.StreamResponse:
        place, labels = _selected(place, request)
        since = int(request.query.get("resourceVersion", "0"))
        if since < self._forgotten:
            return _status(410, "too old resource version")
        watcher = Watcher(place, labels)
        for number, kind, at, document in self._history:
            if number > since and place.holds(at) and _has_labels(document, labels):
                watcher.events.put_nowait({"type": kind, "object": document})
        self._watchers.append(watcher)
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        try:
            await response.prepare(request)
            while (event := await watcher.events.get()) is not None:
                if not self.is_mute:
                    await response.write(json.dumps(event).encode() + b"\n")
                    if event["type"] == "ERROR":
                        break
        except ConnectionError:
            pass
        finally:
            self._watchers.remove(watcher)
        return response

    @property
    def watching(self) -> int:
        return len(self._watchers)

    def writes(self) -> Iterator[Asked]:
        """Requests that would change something, TokenReviews left out."""
        for asked in self.asked:
            if asked.method != "GET" and not asked.path.endswith("/tokenreviews"):
                yield asked


@contextlib.asynccontextmanager
async def fake_kubernetes() -> AsyncIterator[FakeKubernetes]:
    server = FakeKubernetes()
    await server.start()
    try:
        yield server
    finally:
        await server.stop()


def _place(path: str) -> tuple[Place, str]:
    match = _PATH.fullmatch(path)
    if match is None:
        raise LookupError(f"{path} names nothing")
    place = Place(match["version"], match["kind"], match["namespace"] or "", match["name"] or "")
    return place, match["part"] or ""


def _path(place: Place) -> str:
    namespace = f"/namespaces/{place.namespace}" if place.namespace else ""
    return f"/{place.version}{namespace}/{place.kind}/{place.name}"


def _selected(place: Place, request: web.Request) -> tuple[Place, dict[str, str]]:
    fields = request.query.get("fieldSelector", "")
    name = fields.removeprefix("metadata.name=") if fields else place.name
    labels = dict(pair.split("=", 1) for pair in request.query.get("labelSelector", "").split(",") if pair)
    return Place(place.version, place.kind, place.namespace, name), labels


def _has_labels(document: Object, labels: dict[str, str]) -> bool:
    return labels.items() <= document["metadata"].get("labels", {}).items()


def _status(code: int, message: str) -> web.Response:
    headers = {"Retry-After": "1"} if code == 429 else {}
    body = {"kind": "Status", "status": "Failure", "code": code, "message": message}
    return web.json_response(body, status=code, headers=headers)


def _gone() -> Object:
    return {"type": "ERROR", "object": {"kind": "Status", "code": 410, "message": "too old resource version"}}


def _merged(target: Any, patch: Any) -> Any:
    """A JSON merge patch applied."""
    if not isinstance(patch, dict):
        return patch
    target = target if isinstance(target, dict) else {}
    for name, value in patch.items():
        if value is None:
            target.pop(name, None)
        else:
            target[name] = _merged(target.get(name), value)
    return target


def _applied(target: Object, wanted: Object) -> Object:
    for name, value in wanted.items():
        if isinstance(value, dict):
            target[name] = _applied(target.get(name) or {}, value)
        elif name in _LIST_KEYS:
            key = _LIST_KEYS[name]
            by_key = {item[key]: item for item in target.get(name) or []}
            for item in value:
                by_key[item[key]] = _applied(by_key.get(item[key], {}), item)
            target[name] = list(by_key.values())
        else:
            target[name] = copy.deepcopy(value)
    return target


def _without(target: Object, last: Object, wanted: Object, others: list[Object]) -> Object:
    """``target`` without what was applied last and is wished no more, but for what ``others`` apply too."""
    for name, value in last.items():
        if name not in target or name in ("apiVersion", "kind", "metadata"):
            continue
        theirs = [other[name] for other in others if name in other]
        if isinstance(value, dict):
            _without(target[name], value, wanted.get(name) or {}, theirs)
            if name not in wanted and not theirs and not target[name]:
                del target[name]
        elif name in _LIST_KEYS:
            key = _LIST_KEYS[name]
            kept = {item[key]: item for item in wanted.get(name) or []}
            before = {item[key]: item for item in value}
            items = []
            for item in target[name]:
                of_others = [each for their in theirs for each in their if each[key] == item[key]]
                if item[key] in before and item[key] not in kept and not of_others:
                    continue
                if item[key] in before:
                    _without(item, before[item[key]], kept.get(item[key], {}), of_others)
                items.append(item)
            target[name] = items
        elif name not in wanted and not theirs:
            del target[name]
    return target

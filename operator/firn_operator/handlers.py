"""Watches, by kopf: every event of every kind goes to the feed, and nothing else happens here.

kopf keeps no state of ours (no finalizers, annotations or Events of its own), and is asked for the objects of ours alone by
label. It is started when this operator leads, and only then.
"""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterator
from random import Random
from typing import Any

import kopf

from firn.errors import Unavailable
from firn_operator.kube import NODE, OWNED, WATCHED, Kind, Obj
from firn_operator.names import SELECTOR

CHECK_S = 2.0
STOPPED_S = 10.0  # in which kopf's tasks have ended
BEGUN_S = (
    120.0  # in which all watches have begun; an API server that does not answer is asked again meanwhile
)
WATCHER = "watcher for "  # how kopf names the task of a watch
Event = Callable[[Obj, bool], Awaitable[None]]


def registry_of(event: Event, *, sees_nodes: bool) -> kopf.OperatorRegistry:
    """The handlers: ``event(obj, is_gone)`` for whatever is watched."""
    registry = kopf.OperatorRegistry()

    async def login(**kwargs: Any) -> kopf.ConnectionInfo | None:
        return kopf.login_with_service_account(**kwargs) or kopf.login_with_kubeconfig(**kwargs)

    kopf.on.login(registry=registry)(login)
    for kind in (*WATCHED, *OWNED, *((NODE,) if sees_nodes else ())):
        kopf.on.event(*_place(kind), registry=registry, id=kind.kind)(_handler(kind, event))
    return registry


def _place(kind: Kind) -> tuple[str, str, str]:
    group, _, version = kind.api_version.rpartition("/")
    return group, version, kind.plural


def _handler(kind: Kind, event: Event) -> Callable[..., Awaitable[None]]:
    async def handle(type: str | None, body: kopf.Body, **_: Any) -> None:
        obj: Obj = {"apiVersion": kind.api_version, "kind": kind.kind, **dict(body)}
        await event(obj, type == "DELETED")

    return handle


def settings_of() -> kopf.OperatorSettings:
    settings = kopf.OperatorSettings()
    settings.posting.enabled = False
    settings.scanning.disabled = True  # no right to watch CRDs and namespaces is needed
    settings.peering.standalone = True
    settings.watching.server_timeout = 300
    settings.watching.client_timeout = 310
    settings.networking.error_backoffs = _Backoffs()
    settings.process.ultimate_exiting_timeout = (
        None  # else this process is killed so long after kopf has ended
    )
    settings.persistence.finalizer = "firn.dev/none"
    settings.persistence.diffbase_storage = _NoDiffs()
    for kind in OWNED:
        settings.watching.label_selectors[_place(kind)] = SELECTOR
    return settings


class _NoDiffs(kopf.DiffBaseStorage):
    """What an object was when it was last handled: not asked for here, and a quarter of kopf's work for an event."""

    def build(self, *, body: kopf.Body, extra_fields: Any = None) -> kopf.BodyEssence:
        return kopf.BodyEssence()

    def fetch(self, *, body: kopf.Body) -> kopf.BodyEssence | None:
        return None

    def store(self, *, body: kopf.Body, patch: kopf.Patch, essence: kopf.BodyEssence) -> None:
        pass


class _Backoffs:
    """Pauses between tries of a request that fails: longer and longer, never twice the same, and for ever."""

    def __iter__(self) -> Iterator[float]:
        pause, randomness = 0.5, Random()
        while True:
            yield pause * randomness.uniform(0.5, 1.0)
            pause = min(pause * 1.7, 30.0)


async def watch(event: Event, *, namespaces: tuple[str, ...], sees_nodes: bool, stop: asyncio.Event) -> None:
    """Watch until ``stop``, SIGTERM or SIGINT. Errors: Unavailable when a watch ends for good; the process ends with it.

    Not ``kopf.operator``: after a watch has failed, that cancels whatever began after it, each watch with what wakes it for
    a pause, which takes the one for the other, begins anew, and waits for credentials for ever.
    """
    roots = await kopf.spawn_tasks(
        registry=registry_of(event, sees_nodes=sees_nodes), settings=settings_of(), standalone=True,
        clusterwide=not namespaces, namespaces=list(namespaces), stop_flag=stop,
    )  # fmt: skip
    ear = asyncio.create_task(hearing(watches_of(namespaces, sees_nodes=sees_nodes)), name="hearing")
    try:
        done, _ = await asyncio.wait([*roots, ear], return_when=asyncio.FIRST_COMPLETED)
    finally:
        ear.cancel()
        await _end(roots)
        await _end(_watches())
    for task in done:
        if not task.cancelled() and (error := task.exception()) is not None:
            raise Unavailable(f"a watch has ended for good: {type(error).__name__} {error}") from error
    if ear in done:
        raise Unavailable("a watch has ended for good, or has never begun")


async def _end(tasks: Collection[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    if tasks:
        done, _ = await asyncio.wait(tasks, timeout=STOPPED_S)
        await asyncio.gather(*done, return_exceptions=True)  # so that none counts as an error that nobody saw


def _watches() -> list[asyncio.Task[None]]:
    return [task for task in asyncio.all_tasks() if task.get_name().startswith(WATCHER)]


def watches_of(namespaces: tuple[str, ...], *, sees_nodes: bool) -> int:
    """How many watches there are to be."""
    return max(1, len(set(namespaces))) * len((*WATCHED, *OWNED)) + sees_nodes


async def hearing(watches: int, *, check_s: float = CHECK_S, begun_s: float = BEGUN_S) -> None:
    """Return when there are fewer watches than there are to be: one has ended, or has not begun in time.

    kopf itself goes on without a kind that it does not find.
    """
    loop = asyncio.get_running_loop()
    latest, have_all_begun = loop.time() + begun_s, False
    while True:
        await asyncio.sleep(check_s)
        if len(_watches()) >= watches:
            have_all_begun = True
        elif have_all_begun or loop.time() > latest:
            return

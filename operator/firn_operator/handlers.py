"""Watches, by kopf: every event of every kind goes to the feed, and nothing else happens here.

kopf keeps no state of ours (no finalizers, annotations or Events of its own), and is asked for the objects of ours alone by
label. It is started when this operator leads, and only then.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import kopf

from firn_operator.kube import NODE, OWNED, WATCHED, Kind, Obj
from firn_operator.names import SELECTOR

CHECK_S = 2.0
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
    """Pauses between tries of a request that fails: longer and longer, and for ever."""

    def __iter__(self) -> Any:
        pause = 0.5
        while True:
            yield pause
            pause = min(pause * 1.7, 30.0)


async def watch(event: Event, *, namespaces: tuple[str, ...], sees_nodes: bool, stop: asyncio.Event) -> None:
    """Watch until ``stop``. Errors: whatever ends a watch for good; the process ends with it."""
    await kopf.operator(
        registry=registry_of(event, sees_nodes=sees_nodes), settings=settings_of(), standalone=True,
        clusterwide=not namespaces, namespaces=list(namespaces), stop_flag=stop,
    )  # fmt: skip


async def hearing() -> None:
    """Return when there are fewer watches than there were.

    An error within a watch's stream, other than that it is too old, ends that watch for good, and kopf goes on without it.
    """
    most = 0
    while True:
        await asyncio.sleep(CHECK_S)
        watches = sum(task.get_name().startswith(WATCHER) for task in asyncio.all_tasks())
        if watches < most:
            return
        most = watches

"""Objects of one kind as they are: listed, then watched.

Invariants: after ``listed`` is set, ``objects`` is what the API server has, or had a moment ago, and every difference
was told by ``changed``; a watch that ends, breaks off or says nothing for ``SILENT_S`` is begun again where it was; what
it would go on from being forgotten (410), everything is listed anew.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Callable
from types import TracebackType

from firn_node.clock import Randomness
from firn_node.kubernetes.api import GONE, Api, ApiError, Denied, Object

PAGE = 500  # objects a request, some MB
WATCH_S = 300  # after so long the server ends a watch
SILENT_S = 330.0
_PAUSE_S, _PAUSE_MAX_S = 0.1, 10.0

log = logging.getLogger("firn.kubernetes")


class Pending:
    """The next event of a stream, waited for in turns: giving up waiting does not lose it."""

    def __init__(self, events: AsyncGenerator[Object, None]) -> None:
        self._events = events
        self._next: asyncio.Future[Object] | None = None

    async def next(self, seconds: float) -> Object | None:
        """An event; None when the stream has ended. *Errors*: TimeoutError when there was none; those of the stream."""
        if self._next is None:
            self._next = asyncio.ensure_future(anext(self._events))
        done, _ = await asyncio.wait([self._next], timeout=seconds)
        if not done:
            raise TimeoutError
        finished, self._next = self._next, None
        try:
            return finished.result()
        except StopAsyncIteration:
            return None

    async def __aenter__(self) -> "Pending":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._next is not None:
            self._next.cancel()
            await asyncio.gather(self._next, return_exceptions=True)
        await self._events.aclose()


class Collection:
    """``path``: of the list; ``name``: only the object of this name. ``changed`` is called with a name."""

    def __init__(
        self, api: Api, path: str, changed: Callable[[str], None], randomness: Randomness, *, name: str = ""
    ) -> None:
        self.objects: dict[str, Object] = {}
        self.listed = asyncio.Event()
        self.trouble: str | None = None  # why it is not known what there is now
        self._api = api
        self._path = path
        self._changed = changed
        self._randomness = randomness
        self._version = ""  # to watch from; empty: everything is to be listed
        self._query = {"fieldSelector": f"metadata.name={name}"} if name else {}

    async def run(self) -> None:
        """Keep ``objects`` as they are, until cancelled."""
        failures = 0
        while True:
            try:
                if not self._version:
                    self._version = await self._list()
                self.trouble = None
                failures = 0 if await self._watch() else failures + 1
            except ApiError as error:
                if isinstance(error, Denied) and error.status == GONE:
                    self._version = ""
                failures += 1
                self.trouble = str(error)
                if failures == 1:
                    log.info("%s: %s", self._path, error)
            pause = min(_PAUSE_MAX_S, _PAUSE_S * 2.0 ** min(failures, 10))
            await asyncio.sleep(pause * self._randomness.uniform(0.5, 1.0))

    def keep(self, found: Object) -> None:
        """Know an object as a change was answered with it, unless a newer one is known."""
        name = found["metadata"]["name"]
        known = self.objects.get(name)
        if known is not None and _number(known) < _number(found):
            self.objects[name] = found

    async def _list(self) -> str:
        """Know all objects; the version to watch from. *Errors*: ApiError."""
        found: dict[str, Object] = {}
        query = {**self._query, "limit": str(PAGE)}
        while True:
            page = await self._api.request("GET", self._path, query=query)
            metadata = page.get("metadata") or {}
            for document in page.get("items") or ():
                found[document["metadata"]["name"]] = document
            if not metadata.get("continue"):
                break
            query["continue"] = metadata["continue"]
        before, self.objects = self.objects, found
        for name in before.keys() | found.keys():
            if _number(before.get(name)) != _number(found.get(name)):
                self._changed(name)
        self.listed.set()
        return str(metadata.get("resourceVersion", ""))

    async def _watch(self) -> bool:
        """Take events until the watch ends as it should; False when it has told nothing.

        Errors: ApiError, after which the last version is still good but for 410.
        """
        query = {
            **self._query, "resourceVersion": self._version, "timeoutSeconds": str(WATCH_S),
            "allowWatchBookmarks": "true",
        }  # fmt: skip
        has_told = False
        async with Pending(self._api.watch(self._path, query)) as events:
            with contextlib.suppress(TimeoutError):
                while (event := await events.next(SILENT_S)) is not None:
                    document = event["object"]
                    self._version = document["metadata"]["resourceVersion"]
                    self._take(event["type"], document)
                    has_told = True
        return has_told

    def _take(self, kind: str, document: Object) -> None:
        if kind == "BOOKMARK":
            return
        name = document["metadata"]["name"]
        known = self.objects.get(name)
        if kind == "DELETED":
            with contextlib.suppress(KeyError):
                del self.objects[name]
        elif known is not None and _number(known) >= _number(document):
            return
        else:
            self.objects[name] = document
        self._changed(name)


def _number(document: Object | None) -> int:
    """The API server's versions grow with time."""
    return 0 if document is None else int(document["metadata"]["resourceVersion"])

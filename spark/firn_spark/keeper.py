"""Holding the leases of snapshots that were opened for queries, in the driver's own process.

Spark plans in a process that may be gone before the first task starts, and tells nobody when a query has ended. So the
planner hands a snapshot that it has opened over to a *keeper*: a thread of the driver, which ``session.register`` starts.
It renews every lease, and gives it back when nobody has used it for ``IDLE_S``, when the session ends, or with the
process. Used is a lease that tasks renew, as each does that reads its snapshot: the broker counts renewals, and the keeper
knows its own. The jobs that run then hold it until they end: one of them reads it, may compute for long, and reads it
again where an executor is lost. Until the first task has come to it, any job counts as a use, because it may be the one
that will. Queries that begin later, which a busy session always has, do not hold it. Without a keeper
(``format("firn")`` without ``register``) tasks alone hold the lease, and a query whose tasks all wait for ten minutes fails
with SnapshotExpired.

The way there is a socket in a folder of the driver's own, and a secret; both travel in the environment of the driver's
Python processes. A message is the JSON of a lease. What comes with another secret is not looked at.
"""

import atexit
import json
import logging
import os
import secrets
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Listener
from typing import Any, TypeVar

from firn.client.transport import path_of
from firn.errors import FirnError, SnapshotExpired, Unavailable
from firn_spark.connection import Connection
from firn_spark.fetch import Link
from firn_spark.planning import Lease

log = logging.getLogger(__name__)

ENVIRONMENT = "FIRN_SPARK_KEEPER"  # SOCKET:SECRET
RENEW_S = 120.0  # a fifth of the lease
IDLE_S = 600.0  # a notebook's user looks at a result, and goes on with the same DataFrame
POLL_S = 5.0
GIVE_BACK_S = 2.0  # the end of a program waits for it
LOST_S = 60.0  # a driver that cannot be asked for so long has ended

T = TypeVar("T")
Document = dict[str, Any]
Jobs = Callable[[], frozenset[int] | None]


def hand_over(lease: Lease) -> None:
    """Have the driver's keeper hold a lease; without one nothing happens."""
    socket, _, secret = os.environ.get(ENVIRONMENT, "").rpartition(":")
    if not socket:
        return
    document = {"topic": lease.topic, "id": lease.id, "options": dict(lease.options)}
    try:
        with Client(socket, family="AF_UNIX", authkey=bytes.fromhex(secret)) as connection:
            connection.send_bytes(json.dumps(document).encode())
    except (OSError, EOFError, AuthenticationError) as error:
        log.warning("the snapshot %s of %s is held by its tasks alone: %s", lease.id, lease.topic, error)


@dataclass(slots=True)
class _Held:
    """``renewals``: as the broker has counted them; ``asked``: how many of the keeper's own it may have counted since.
    ``is_read``: whether a task has come to it. ``jobs``: those that ran at its last use; None: to be asked at the next look,
    because Spark tells of a job a little after its first task has started.
    """

    lease: Lease
    used: float
    renewed: float
    renewals: int = 0
    asked: int = 0
    is_read: bool = False
    jobs: frozenset[int] | None = None

    @property
    def parts(self) -> int:
        return self.lease.id.count(",") + 1


class Keeper:
    """Holds leases until it is closed. ``active_jobs``: the ids of those that run now; None: none ever will again. What it
    raises says nothing of either, until it has done so for ``lost_s``.
    """

    def __init__(
        self, active_jobs: Jobs, *, idle_s: float = IDLE_S, renew_s: float = RENEW_S,
        poll_s: float = POLL_S, lost_s: float = LOST_S, clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self._active_jobs = active_jobs
        self._active: frozenset[int] = frozenset()  # as the driver has said last
        self._idle_s = idle_s
        self._renew_s = renew_s
        self._poll_s = poll_s
        self._lost_s = lost_s
        self._clock = clock
        self._answered = clock()  # when the driver could be asked last
        self._leases: dict[str, _Held] = {}  # by id
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._folder = tempfile.mkdtemp(prefix="firn-keeper-")  # nobody else's: mode 0700
        secret = secrets.token_bytes(32)
        self._listener = Listener(os.path.join(self._folder, "s"), "AF_UNIX", authkey=secret)
        self.environment = {ENVIRONMENT: f"{self._listener.address}:{secret.hex()}"}
        for work, name in ((self._take, "taking"), (self._hold, "holding")):
            threading.Thread(target=work, name=f"firn keeper {name}", daemon=True).start()
        atexit.register(self.close)

    @property
    def held(self) -> list[str]:
        """The ids of the snapshots that are held."""
        with self._lock:
            return list(self._leases)

    def close(self) -> None:
        """Give back what is held, and take nothing more."""
        if self._ended.is_set():
            return
        self._ended.set()
        atexit.unregister(self.close)
        with suppress(OSError):  # wakes who waits for the next message
            Client(os.path.join(self._folder, "s"), family="AF_UNIX").close()
        self._listener.close()
        shutil.rmtree(self._folder, ignore_errors=True)
        with self._lock:
            leases = [held.lease for held in self._leases.values()]
            self._leases.clear()
        _give_back(leases)

    def _take(self) -> None:
        while not self._ended.is_set():
            try:
                with self._listener.accept() as connection:
                    document = json.loads(connection.recv_bytes(1 << 16))
                lease = Lease(document["topic"], document["id"], document["options"])
            except (OSError, EOFError, AuthenticationError, ValueError, LookupError, TypeError) as error:
                if not self._ended.is_set():
                    log.warning("a message to the keeper of snapshots was not understood: %s", error)
                continue
            now = self._clock()
            with self._lock:
                self._leases[lease.id] = _Held(lease, now, now)

    def _hold(self) -> None:
        while not self._ended.wait(self._poll_s):
            now = self._clock()
            active = self._asked(now)
            if active is None:
                self.close()
                return
            due = [
                held
                for held in self._noted(now, active)
                if now >= min(held.used + self._idle_s, held.renewed + self._renew_s)
            ]
            unused = [held for held in self._renew(due, now) if now - held.used >= self._idle_s]
            for held in unused:
                self._let_go(held)
            _give_back([held.lease for held in unused])

    def _asked(self, now: float) -> frozenset[int] | None:
        """The jobs that run, as far as the driver says; None: nothing is to be held any more."""
        try:
            found = self._active_jobs()
        except Exception as error:  # what Py4J raises, passing or while the JVM goes away, is any of many
            log.debug("the driver did not say which jobs run: %s", error)
            return self._active if now - self._answered < self._lost_s else None
        self._answered = now
        if found is not None:
            self._active = found
        return found

    def _noted(self, now: float, active: frozenset[int]) -> list[_Held]:
        """What is held; jobs that run may be on their way to what no task has come to yet."""
        with self._lock:
            for held in self._leases.values():
                if held.jobs is None or not held.is_read:
                    held.jobs = active
                if not active.isdisjoint(held.jobs):
                    held.used = now
            return list(self._leases.values())

    def _renew(self, due: Sequence[_Held], now: float) -> list[_Held]:
        """Those of them that the brokers have still."""
        for held in due:
            held.asked += held.parts
        answers = _renewed([held.lease for held in due])
        return [held for held, answer in zip(due, answers, strict=True) if self._take_in(held, answer, now)]

    def _take_in(self, held: _Held, answer: Sequence[Document] | FirnError | OSError, now: float) -> bool:
        """Whether the broker has it still, and so has said how often it was renewed."""
        lease = held.lease
        if isinstance(answer, FirnError | OSError):  # the lease lasts for five rounds
            log.warning("the snapshot %s of %s was not renewed: %s", lease.id, lease.topic, answer)
            if isinstance(answer, FirnError) and not answer.retry:
                self._let_go(held)
            return False
        renewals = sum(int(part.get("renewals", 0)) for part in answer)
        if renewals > held.renewals + held.asked:
            held.used, held.is_read, held.jobs = now, True, None
        elif held.asked > held.parts:  # an answer was lost: nobody knows whose renewals were counted
            held.used, held.jobs = now, None
        held.renewals, held.renewed, held.asked = renewals, now, 0
        return True

    def _let_go(self, held: _Held) -> None:
        with self._lock:
            self._leases.pop(held.lease.id, None)


def _renewed(leases: Sequence[Lease]) -> list[list[Document] | FirnError | OSError]:
    """What is answered about each, asked side by side: a broker that is silent keeps nobody else's lease waiting."""
    with ExitStack() as stack:
        links: dict[tuple[tuple[str, str], ...], Link] = {}  # by what their connections are made of

        def ask(lease: Lease) -> "Future[list[Document]]":
            made_of = tuple(sorted(lease.options.items()))
            if made_of not in links:
                links[made_of] = stack.enter_context(Link(Connection.of_options(lease.options)))
            return links[made_of].submit(_ask(links[made_of], "PUT", lease))

        asked = [_caught(partial(ask, lease)) for lease in leases]
        return [each if isinstance(each, FirnError | OSError) else _caught(each.result) for each in asked]


def _caught(work: Callable[[], T]) -> T | FirnError | OSError:
    try:
        return work()
    except (FirnError, OSError) as error:
        return error


def _give_back(leases: Sequence[Lease]) -> None:
    """What cannot be given back ends by itself: of brokers that do not answer one is asked once."""
    silent: set[str | None] = set()
    for lease in leases:
        broker = lease.options.get("bootstrap")
        if broker in silent:
            continue
        try:
            with Link(replace(Connection.of_options(lease.options), timeout=GIVE_BACK_S)) as link:
                link.run(_ask(link, "DELETE", lease))
        except Unavailable:
            silent.add(broker)
        except (FirnError, OSError) as error:
            log.debug("the snapshot %s of %s was not given back: %s", lease.id, lease.topic, error)


async def _ask(link: Link, method: str, lease: Lease) -> list[Document]:
    """The answer of each broker group that holds a part of the snapshot. *Errors*: FirnError, OSError."""
    target, ids = await link.target(lease.topic), lease.id.split(",")
    if len(ids) != len(target.transports):
        raise SnapshotExpired(f"topic {lease.topic} was made anew, in other broker groups")
    return [
        (await way.request(method, path_of("topics", lease.topic, "snapshots", id))).document()
        for way, id in zip(target.transports, ids, strict=True)
    ]

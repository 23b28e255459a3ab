"""Holding the leases of snapshots that were opened for queries, in the driver's own process.

Spark plans in a process that may be gone before the first task starts, and tells nobody when a query has ended. So the
planner hands a snapshot that it has opened over to a *keeper*: a thread of the driver, which ``session.register`` starts.
It renews every lease while jobs run, and gives it back when none has run for ``IDLE_S``, when the session ends, or with
the process. Tasks renew what they read as well; without a keeper (``format("firn")`` without ``register``) that alone
holds the lease, and a query whose tasks all wait for ten minutes fails with SnapshotExpired.

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
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Listener

from firn.client.transport import path_of
from firn.errors import FirnError, Unavailable
from firn_spark.connection import Connection
from firn_spark.fetch import Link
from firn_spark.planning import Lease

log = logging.getLogger(__name__)

ENVIRONMENT = "FIRN_SPARK_KEEPER"  # SOCKET:SECRET
RENEW_S = 120.0  # a fifth of the lease
IDLE_S = 600.0  # a notebook's user looks at a result, and goes on with the same DataFrame
POLL_S = 5.0
GIVE_BACK_S = 2.0  # the end of a program waits for it


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


class Keeper:
    """Holds leases until it is closed. ``is_busy``: whether anything uses them now; None: nothing ever will again."""

    def __init__(
        self, is_busy: Callable[[], bool | None], *, idle_s: float = IDLE_S, renew_s: float = RENEW_S,
        poll_s: float = POLL_S, clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self._is_busy = is_busy
        self._idle_s = idle_s
        self._renew_s = renew_s
        self._poll_s = poll_s
        self._clock = clock
        self._leases: dict[str, tuple[Lease, float]] = {}  # by id, with when it was taken or renewed
        self._last_use = clock()
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
        self._give_back()

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
            with self._lock:
                self._last_use = self._clock()
                self._leases[lease.id] = lease, self._last_use

    def _hold(self) -> None:
        while not self._ended.wait(self._poll_s):
            busy = self._is_busy()
            if busy is None:
                self.close()
                return
            now = self._clock()
            with self._lock:
                if busy:
                    self._last_use = now
                is_idle = now - self._last_use >= self._idle_s
                due = [lease for lease, since in self._leases.values() if now - since >= self._renew_s]
            if is_idle:
                self._give_back()
                continue
            for lease in due:
                self._renew(lease, now)

    def _renew(self, lease: Lease, now: float) -> None:
        is_gone = False
        try:
            _ask("PUT", lease)
        except (FirnError, OSError) as error:  # the lease lasts for five rounds
            is_gone = isinstance(error, FirnError) and not error.retry
            log.warning("the snapshot %s of %s was not renewed: %s", lease.id, lease.topic, error)
            if not is_gone:
                return
        with self._lock:
            if is_gone:
                self._leases.pop(lease.id, None)
            elif lease.id in self._leases:
                self._leases[lease.id] = lease, now

    def _give_back(self) -> None:
        with self._lock:
            leases, self._leases = [lease for lease, _ in self._leases.values()], {}
        # Brokers that do not answer: what they hold ends by itself, or has ended.
        silent: set[str | None] = set()
        for lease in leases:
            broker = lease.options.get("bootstrap")
            if broker in silent:
                continue
            try:
                _ask("DELETE", lease, timeout=GIVE_BACK_S)
            except Unavailable:
                silent.add(broker)
            except (FirnError, OSError) as error:
                log.debug("the snapshot %s of %s was not given back: %s", lease.id, lease.topic, error)


def _ask(method: str, lease: Lease, *, timeout: float | None = None) -> None:
    connection = Connection.of_options(lease.options)
    with Link(connection if timeout is None else replace(connection, timeout=timeout)) as link:
        target = link.run(link.target(lease.topic))
        for way, id in zip(target.transports, lease.id.split(","), strict=True):
            link.run(way.request(method, path_of("topics", lease.topic, "snapshots", id)))

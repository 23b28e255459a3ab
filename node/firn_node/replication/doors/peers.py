"""The other replicas of a group, as connections: who is dialled, who has dialled, and what leaves by which.

A conversation belongs to the one who begins it: ``Hello``, ``Report``, ``Leave``, ``Ask`` and ``Fence`` leave by the
own connection to a peer, their answers (``Welcome``, ``Refusal``, frames, ``Committed``, ``Answer``) by the connection
that the peer dialled. So a node needs an address only of whom it asks.

Invariants: a connection is between two data folders, not two addresses: the one that answers refuses a dial that is
meant for another log_id; a newer connection of a peer ends the older one; what cannot leave is dropped; a peer that
does not answer is dialled again only when there is something to say, after a jittered pause that grows.

Peers that are kept (``keep``: those in sync) are dialled before there is anything to say. At a failover all clients
of the old master come to those that are left, and whoever dials then waits behind them, for longer than a new master
waits for its standbys.
"""

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from ssl import SSLContext
from typing import Any
from urllib.parse import urlencode

from firn.errors import FirnError, Forbidden, Invalid, NotMaster, Unavailable
from firn_node.clock import Randomness
from firn_node.replication import PATH
from firn_node.replication.doors.codec import VERSION, Arrived
from firn_node.replication.doors.connection import WAITING_MAX, Connection, Flow, dial
from firn_node.replication.messages import Ask, Fence, Hello, Leave, Message, Report
from firn_node.replication.record import GroupId, LogId

log = logging.getLogger("firn.replication")

_BEGINS = (Hello, Report, Leave, Ask, Fence)
PAUSE_S, PAUSE_MAX_S = 0.05, 2.0
KEEP_S = 1.0  # between dials of a kept peer that does not answer, while there is nothing to say

Receive = Callable[[LogId, Arrived], None]


@dataclass(frozen=True, slots=True)
class Dialling:
    """How other replicas are reached."""

    timeout_s: float = 2.0
    tls: Callable[[], SSLContext | None] = lambda: (
        None
    )  # of the next connection: certificates change meanwhile
    headers: Mapping[str, str] = field(default_factory=dict)
    routes: Mapping[str, str] = field(
        default_factory=dict
    )  # a member's address -> where it is dialled instead


class Peers:
    """All connections of one replica. ``address_of``: where a log_id is, by what the core knows now."""

    def __init__(
        self, group_id: GroupId, log_id: LogId, *, receive: Receive, lost: Callable[[LogId], None],
        address_of: Callable[[LogId], str | None], randomness: Randomness, dialling: Dialling | None = None,
        node_of: Callable[[LogId], str | None] = lambda _: None,
    ) -> None:  # fmt: skip
        """``lost``: a peer's connection to this node has ended. ``node_of``: who has a log_id, by the group record."""
        self.group_id = group_id
        self.log_id = log_id
        self._receive = receive
        self._lost = lost
        self._address_of = address_of
        self._node_of = node_of
        self._randomness = randomness
        self._dialling = dialling or Dialling()
        self._links: dict[LogId, _Link] = {}
        self._inbound: dict[LogId, Connection] = {}
        self._is_closed = False

    def send(self, to: LogId, message: Message) -> None:
        """Send, or drop."""
        if self._is_closed:
            return
        if isinstance(message, _BEGINS):
            self._link(to).send(message)
        elif (connection := self._inbound.get(to)) is not None:
            connection.send(message)

    def _link(self, to: LogId) -> "_Link":
        link = self._links.get(to)
        if link is None:
            link = self._links[to] = _Link(self, to)
        return link

    def keep(self, peers: frozenset[LogId]) -> None:
        """Have connections to these, and to no others unless there is something to say to them."""
        if self._is_closed:
            return
        for log_id in peers:
            self._link(log_id).keep(True)
        for log_id in self._links.keys() - peers:
            self._links[log_id].keep(False)

    def stream_to(self, to: LogId) -> Connection | None:
        """The connection that takes log bytes for a peer: the one that it dialled."""
        return self._inbound.get(to)

    def log_bytes_of(self, peer: LogId) -> int:
        """Bytes of the log that have come by the own connection to a peer; 0 without one."""
        link = self._links.get(peer)
        return link.log_bytes if link is not None else 0

    # Connections that others dial.

    def check_dial(self, query: Mapping[str, str], *, node: str | None = None) -> LogId:
        """Who dials, when the dial is meant for this folder. ``node``: whose certificate was shown, if any was.

        *Errors*: Invalid, NotMaster: another folder's; Forbidden: another node's log_id.
        """
        if query.get("version") != str(VERSION):
            raise Invalid(f"replication: version {query.get('version')!r} is not spoken here, only {VERSION}")
        if query.get("group") != self.group_id:
            raise Invalid(
                f"replication: this node is of group {self.group_id}, not of {query.get('group')!r}"
            )
        if query.get("to") != self.log_id:
            raise NotMaster(f"replication: the log here is {self.log_id}, not {query.get('to')!r}")
        source = query.get("from", "")
        if not source or len(source) > 64 or source == self.log_id:
            raise Invalid(f"replication: {source!r:.80} cannot be who dials")
        owner = self._node_of(LogId(source))
        if node is not None and owner not in (None, node):
            raise Forbidden(f"replication: the log {source} is of node {owner}, not of {node}")
        return LogId(source)

    def accept(self, source: LogId, transport: asyncio.Transport, flow: Flow) -> Connection:
        """Take the connection that a peer has dialled, and hand on what arrives."""

        def ended(connection: Connection, why: str) -> None:
            if self._inbound.get(source) is connection:
                del self._inbound[source]
                self._lost(source)

        connection = Connection(
            transport, flow, is_client=False, take=lambda found: self._take(source, found), ended=ended
        )
        older = self._inbound.get(source)
        self._inbound[source] = connection
        if older is not None:
            older.cut("the peer has dialled again")
            self._lost(source)
        if self._is_closed:
            connection.close("this node is stopping")
        return connection

    def _take(self, source: LogId, found: Arrived) -> None:
        if found.message.header.log_id == source and not self._is_closed:
            self._receive(source, found)

    async def close(self) -> None:
        """End all connections."""
        self._is_closed = True
        for connection in list(self._inbound.values()):
            connection.close("this node is stopping")
        await asyncio.gather(*(link.close() for link in self._links.values()))

    def status(self) -> dict[str, Any]:
        """For people: which connections stand, and why others do not."""
        return {
            "dialled": {log_id: link.state for log_id, link in self._links.items()},
            "accepted": sorted(self._inbound),
        }

    # Connections that this node dials.

    async def _dial(self, to: LogId, ended: Callable[[Connection, str], None]) -> Connection:
        address = self._address_of(to)
        if address is None:
            raise Unavailable(f"no address is known of {to}")
        query = {"version": VERSION, "group": self.group_id, "from": self.log_id, "to": to}
        return await dial(
            self._dialling.routes.get(address, address),
            f"{PATH}?{urlencode(query)}", headers=self._dialling.headers, ssl=self._dialling.tls(),
            timeout=self._dialling.timeout_s, randomness=self._randomness,
            take=lambda arrived: self._take(to, arrived), ended=ended,
        )  # fmt: skip

    def pause(self, failures: int) -> float:
        """Seconds before a peer is dialled again, jittered."""
        return min(PAUSE_MAX_S, PAUSE_S * 2.0 ** min(failures - 1, 16)) * self._randomness.uniform(0.5, 1.0)


class _Link:
    """The own connection to one peer, made when there is something to say, or while it is kept."""

    def __init__(self, peers: Peers, to: LogId) -> None:
        self._peers = peers
        self._to = to
        self._waiting: deque[Message] = deque(maxlen=WAITING_MAX)
        self._something = asyncio.Event()
        self._is_kept = False
        self._connection: Connection | None = None
        self.state = "not dialled yet"
        self._task = asyncio.create_task(self._run(), name=f"firn replica link to {to}")

    def send(self, message: Message) -> None:
        if self._connection is not None:
            self._connection.send(message)
        else:
            self._waiting.append(message)
            self._something.set()

    def keep(self, is_kept: bool) -> None:
        if is_kept and not self._is_kept and self._connection is None:
            self._something.set()
        self._is_kept = is_kept

    @property
    def log_bytes(self) -> int:
        return self._connection.log_bytes if self._connection is not None else 0

    async def _wanted(self) -> bool:
        """Return when it is to be dialled; whether there is something to say."""
        if self._is_kept:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(KEEP_S):
                    await self._something.wait()
        else:
            await self._something.wait()
        return self._something.is_set()

    async def _run(self) -> None:
        failures = 0
        while True:
            has_something = await self._wanted()
            try:
                connection = await self._peers._dial(self._to, self._ended)
            except FirnError as error:
                if not has_something:
                    self.state = error.message
                    continue
                failures += 1
                self._fail(error.message)
                if failures == 1:
                    log.info("replica %s cannot be reached: %s", self._to, error.message)
                await asyncio.sleep(self._peers.pause(failures))
                continue
            failures = 0
            self._say(connection)
            await connection.gone.wait()
            self._connection = None
            await asyncio.sleep(self._peers.pause(1))

    def _say(self, connection: Connection) -> None:
        self._something.clear()
        if not connection.is_open:
            return
        self._connection, self.state = connection, "connected"
        while self._waiting:
            connection.send(self._waiting.popleft())

    def _fail(self, why: str) -> None:
        """What waited is too old by the time when somebody answers."""
        self.state = why
        self._waiting.clear()
        self._something.clear()

    def _ended(self, connection: Connection, why: str) -> None:
        if self._connection is connection:
            self._connection = None
        self._fail(why)

    async def close(self) -> None:
        self._task.cancel()
        if self._connection is not None:
            self._connection.close("this node is stopping")
        await asyncio.gather(self._task, return_exceptions=True)

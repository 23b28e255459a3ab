"""The driver of one replica: gives the core its events, carries out its actions.

Everything but small durable writes, cuts, syncs and reads of old log bytes runs on the event loop, run to
completion: an event is stepped, its actions carried out, what they bring about stepped, before anything else happens.

Invariants:

- events reach the core in the order in which they happened. Appends of one turn of the loop are one event, stepped
  at the end of the turn or right before any other event;
- actions are carried out in their order (``carrying``);
- a request that was told of by ``written`` ends exactly once: acknowledged, or with an unknown outcome (``requests``);
- a log that cannot be synced, a bug, or a damaged promise end this process's part in the group for good (``fail``).
"""

import asyncio
import logging
from collections import deque
from typing import Any

from firn.batch import Buffer
from firn.errors import FirnError, NotMaster, Timeout, Unavailable
from firn.types import Epoch, Position
from firn_node.replication import core
from firn_node.replication import events as ev
from firn_node.replication.carrying import Carrying, Tools
from firn_node.replication.doors.codec import Arrived
from firn_node.replication.doors.coordination import Coordination
from firn_node.replication.doors.given import Doors
from firn_node.replication.doors.logdoor import LogDoor
from firn_node.replication.doors.logstream import LogStreams
from firn_node.replication.doors.peers import Peers
from firn_node.replication.doors.syncer import Syncer
from firn_node.replication.messages import Report
from firn_node.replication.record import NEVER_FORCED, LogId
from firn_node.replication.requests import Requests, Wait
from firn_node.replication.rules import RULES
from firn_node.replication.state import NO_EPOCH, Me, Phase, Role, State
from firn_node.replication.work import Work

log = logging.getLogger("firn.replication")

_NO_READS = "the master may not answer reads yet: it has just been elected"
_SWITCHOVER_TTLS = (
    4  # lease TTLs after which the outcome of a switchover counts as unknown; it needs two at most
)


class GroupDriver:
    """One replica while its process lives. Make it on the event loop, then ``start``; at the end ``stop``, once."""

    def __init__(self, me: Me, doors: Doors) -> None:
        self.me = me
        self.state: State
        self._doors = doors
        self._log = doors.log
        self._engine = doors.engine
        self._loop = asyncio.get_running_loop()
        self._events: deque[tuple[ev.Event, Buffer]] = deque()  # with the bytes of a frame
        self._is_stepping = False
        self.data: Buffer = b""  # of the frame whose step runs
        self._log_bytes = 0  # that have come from the master, as of the last tick
        self._requests = Requests()
        self._streams = LogStreams(self._log, history=lambda: self.state.log.history, damaged=self.damaged)
        self._log_door = LogDoor(self._log, doors.folder.epoch_file, me, doors.log_clock)
        self._ticker: asyncio.TimerHandle | None = None
        self._sync_due: asyncio.TimerHandle | None = None
        self._asking: set[asyncio.Future[None]] = set()  # who wait to be told who acts as master
        self._left: asyncio.Future[None] | None = None  # done when this node is out of in_sync, as it asked
        self._work = Work(me.group_id, self.fail)
        self.failed: str | None = None
        self.troubles: dict[str, str] = {}
        self._syncer = Syncer(
            self._log, cuts=lambda: self._log_door.cuts, durable=self._durable, failed=self.fail
        )
        self.peers = Peers(
            me.group_id, me.log_id, receive=self._receive, lost=self._streams.stop, address_of=self._address_of,
            randomness=doors.randomness, dialling=doors.dialling, node_of=self._node_of,
        )  # fmt: skip
        self._coordination = Coordination(
            doors.coordinator, me.group_id, feed=self.feed, broken=lambda why: self.fail(why, is_bug=True)
        )
        tools = Tools(
            self.peers, self._coordination, self._log_door, self._streams, self._syncer, self._requests,
            self._work,
        )  # fmt: skip
        self._carrying = Carrying(me, doors, tools, self)
        self.state, self._first = core.start(me, doors.folder.startup, doors.timing, self._now())

    def start(self) -> None:
        """Take part in the group."""
        first, self._first = self._first, ()
        self._carry_out(first)
        self._step_all()
        self._tick()

    async def stop(self) -> None:
        """Take no further part, cleanly: what was written is durable on return, and the folder says so.

        The order: 1. no more events; open requests end, connections close, 2. what is under way in threads ends, 3. the
        log is synced, 4. its epochs are stored, 5. the mark of a clean stop. The caller then closes the log.
        """
        was_failed = self.failed is not None
        self._end("this broker is stopping")
        await asyncio.gather(self.peers.close(), self._coordination.close(), self._syncer.stop())
        await self._work.end_tasks()
        if not was_failed and not self._log.is_broken:
            try:
                await self._work.in_thread(self._say_goodbye)
            except OSError as error:  # the next process finds no mark of a clean stop
                log.warning(
                    "group %s: the folder could not be told of a clean stop: %s", self.me.group_id, error
                )
        await self._work.end_thread()

    def _say_goodbye(self) -> None:
        folder, state = self._doors.folder, self.state
        end = Position(self._log.sync())
        if state.log.written == end:
            folder.epoch_file.store(state.log.history, end)
        folder.group_file.store(state.wanted, was_shut_down=True)

    # Events.

    def feed(self, event: ev.Event, data: Buffer = b"") -> None:
        """Step an event, after the appends of this turn, and whatever it brings about."""
        if self.failed is None:
            self._tell_writes()
            self._events.append((event, data))
            self._step_all()

    def feed_first(self, event: ev.Event) -> None:
        self._events.appendleft((event, b""))

    def feed_last(self, event: ev.Event) -> None:
        self._events.append((event, b""))

    def _step_all(self) -> None:
        if self._is_stepping:
            return
        self._is_stepping = True
        try:
            while self._events and self.failed is None:
                self._step(*self._events.popleft())
        except Exception as error:  # the boundary of the core: what it did not foresee is a bug
            log.exception("group %s", self.me.group_id)
            self.fail(error.message if isinstance(error, FirnError) else repr(error), is_bug=True)
        finally:
            self._is_stepping = False

    def _step(self, event: ev.Event, data: Buffer) -> None:
        before, self.data = self.state, data
        self.state, actions = core.step(before, event, self._now())
        self._carry_out(actions)
        if type(event) is ev.Written:
            self._wrote(event)
        if self.state.record is not before.record and self.state.record is not None:
            self.peers.keep(self.state.record.in_sync - {self.me.log_id})
        self._settle()
        if self._asking and self._is_master_named:
            self._answer_asking()
        if before.role is not self.state.role:
            log.info("group %s: %s -> %s", self.me.group_id, before.role.value, self.state.role.value)

    def _carry_out(self, actions: tuple[ev.Action, ...]) -> None:
        for action in actions:
            if self.failed is not None:
                return
            self._carrying.out(action)

    def _wrote(self, event: ev.Written) -> None:
        """The log has grown: send it, sync it; requests that the core did not take have no known outcome."""
        self._streams.wrote()
        if not event.writes or not all(write.is_interval for write in event.writes):
            self._syncer.request()
        elif self._sync_due is None:
            self._sync_due = self._loop.call_later(self._doors.flush_interval_s, self._sync_now)
        if self.state.mastery is None and event.writes:
            self._requests.time_out("this node was deposed", [write.ticket for write in event.writes])

    def _sync_now(self) -> None:
        self._sync_due = None
        self._syncer.request()

    def _durable(self, end: Position, cuts: int) -> None:
        self.feed(ev.Durable(end, cuts))

    def _tick(self) -> None:
        self._ticker = self._loop.call_later(self._doors.timing.tick, self._tick)
        following = self.state.following
        if following is not None:
            before, self._log_bytes = self._log_bytes, self.peers.log_bytes_of(following.master)
            if self._log_bytes != before:
                self.feed(ev.Arriving())
        self.feed(ev.Tick())

    def _now(self) -> float:
        return self._doors.clock.monotonic()

    def _receive(self, source: LogId, found: Arrived) -> None:
        message = found.message
        if isinstance(message, Report):
            self._streams.heard(source, message)
        self.feed(ev.Received(message), found.data)

    def _address_of(self, log_id: LogId) -> str | None:
        record = self.state.record
        member = record.members.get(log_id) if record is not None else None
        return member.address if member is not None else None

    def _node_of(self, log_id: LogId) -> str | None:
        record = self.state.record
        member = record.members.get(log_id) if record is not None else None
        return member.node if member is not None else None

    # What the engine asks (``serving.Replication``).

    @property
    def role(self) -> Role:
        return self.state.role

    @property
    def is_master(self) -> bool:
        return self.state.role is Role.MASTER

    @property
    def has_others_in_sync(self) -> bool:
        """Another replica holds everything that was ever acknowledged, by the newest record seen."""
        record = self.state.record
        return record is not None and bool(record.in_sync - {self.me.log_id})

    @property
    def is_settled(self) -> bool:
        """A master that takes writes and answers reads, or a standby that follows one."""
        return self.hindrance is None

    @property
    def hindrance(self) -> str | None:
        """Why it is not settled."""
        state = self.state
        if self.failed is not None:
            return self.failed
        if state.role in (Role.MASTER, Role.RESIGNING):
            refusal = core.write_refusal(state, self._now(), 1)
            if refusal is not None:
                return refusal.message
            return None if core.may_read(state, self._now()) else _NO_READS
        if self.is_following:
            return None
        if state.record is None and (why := self._coordination.unknown) is not None:
            return why
        if core.master_address(state, self._now()) is None:
            return "no replica acts as master"
        return "the master has not answered yet"

    @property
    def epoch(self) -> Epoch:
        return self.state.epoch

    @property
    def forced_epoch(self) -> Epoch:
        return self.state.record.forced_epoch if self.state.record is not None else NEVER_FORCED

    @property
    def committed(self) -> Position:
        return self.state.committed

    def admit(self, min_in_sync: int) -> None:
        self._check_alive()
        refusal = core.write_refusal(self.state, self._now(), min_in_sync)
        if refusal is not None:
            raise refusal

    def written(self, end: int, *, min_in_sync: int, is_interval: bool = False) -> Wait:
        if not self._requests.has_turn:
            self._loop.call_soon(self._end_turn)
        return self._requests.write(end, min_in_sync=min_in_sync, is_interval=is_interval)

    def _end_turn(self) -> None:
        self._tell_writes()
        self._step_all()

    def _tell_writes(self) -> None:
        """What was appended in this turn becomes an event, before any other."""
        event = self._requests.take_turn()
        if event is None:
            return
        if self.failed is None:
            self._events.append((event, b""))
        else:
            self._requests.time_out(self.failed)

    def check_read(self) -> None:
        self.check_master()
        now = self._now()
        if not RULES.has_lease_to_read(self.state, now):
            raise core.no_lease()
        if not core.may_read(self.state, now):
            raise Unavailable(_NO_READS)

    def check_any_read(self) -> None:
        self._check_alive()
        if self.state.role is not Role.STANDBY:
            self.check_read()
        elif not self.is_following:
            raise self.not_master()

    def check_master(self) -> None:
        """Errors: NotMaster, with the address of who is; Unavailable."""
        self._check_alive()
        if self.state.role is not Role.MASTER:
            raise self.not_master()

    def _check_alive(self) -> None:
        if self.failed is not None:
            raise Unavailable(f"this replica takes no part in its group: {self.failed}")

    @property
    def _is_master_named(self) -> bool:
        if self.failed is not None:
            return True
        if self.state.role is Role.MASTER:
            return self.is_settled
        return core.master_address(self.state, self._now()) is not None

    def _answer_asking(self) -> None:
        asking, self._asking = self._asking, set()
        for each in asking:
            if not each.done():
                each.set_result(None)

    async def until_master_named(self, within_s: float) -> None:
        """Return when it is known who acts as master (this node: once it takes writes), or after that time.

        Clients are told then, and not that nobody is: they need not ask again and again through an election.
        """
        if self._is_master_named:
            return
        named: asyncio.Future[None] = self._loop.create_future()
        self._asking.add(named)
        try:
            async with asyncio.timeout(within_s):
                await named
        except TimeoutError:
            pass
        finally:
            self._asking.discard(named)

    def not_master(self) -> FirnError:
        address = core.master_address(self.state, self._now())
        return NotMaster("this node is not the master of the group", address=address)

    def hurry(self) -> None:
        self._syncer.request()

    def dispatched(self, position: int) -> None:
        self.feed(ev.Dispatched(Position(position)))

    def topics_changed(self, *, largest_min_in_sync: int, has_interval: bool) -> None:
        self.feed(ev.TopicsChanged(largest_min_in_sync, has_interval))

    def released(self, start: int) -> None:
        self.feed(ev.Released(Position(start)))

    def rebuilt(self) -> None:
        """What precedes the own log is here, by key."""
        self.feed(ev.Rebuilt())

    def damaged(self, reason: str) -> None:
        self.feed(ev.LogDamaged(reason))

    def let_go_of_log(self) -> None:
        """There is no room: hold the log for nobody who is not in sync; who loses its place starts anew."""
        record = self.state.record
        self._streams.let_go(keeping=record.in_sync if record is not None else frozenset())

    async def checkpoint(self, position: int) -> None:
        history = self.state.log.history
        await self._work.in_thread(lambda: self._doors.folder.epoch_file.store(history, Position(position)))

    # What people ask.

    async def switchover(self, to: LogId) -> None:
        """Return once ``to`` is master. *Errors*: Unavailable says why it is not; Timeout when nobody knows."""
        await self._change_master(to, ev.SwitchoverAsked(to))

    async def accept_data_loss(self, by: str) -> None:
        """Return once this node is master, whatever others hold; ``by``: the person who answers for it.

        *Errors*: Unavailable, at once while another master shows life: asking the others would depose it.
        """
        record = self.state.record
        if record is None or not RULES.is_silent(self.state, self._now()):
            raise Unavailable(
                "the group has, or had until a moment ago, a master that acts; hand over with `firn switchover` "
                "alone, or try again when it is gone"
            )
        log.warning("group %s: data loss accepted by %s", self.me.group_id, by)
        await self._change_master(self.me.log_id, ev.DataLossAccepted(by))

    async def _change_master(self, to: LogId, event: ev.SwitchoverAsked | ev.DataLossAccepted) -> None:
        self._check_alive()
        record = self.state.record
        wait = self._requests.begin_switchover(to, record.epoch if record is not None else NO_EPOCH)
        self.feed(event)
        seconds = _SWITCHOVER_TTLS * self._doors.timing.lease_ttl
        try:
            async with asyncio.timeout(seconds):
                await wait
        except TimeoutError:
            reason = f"nobody became master within {seconds:g} s; `firn status` shows who is, and why"
            raise Timeout(reason) from None
        finally:
            self._requests.end_switchover(wait)

    async def leave(self) -> None:
        """Before a planned stop of a standby: return once nobody waits for it, if its master can spare it at all."""
        following = self.state.following
        self.feed(ev.LeaveAsked())
        has_told = following is not None and self.state.following is None
        if has_told and self.failed is None and self.is_in_sync:
            self._left = self._loop.create_future()
            await self._left

    @property
    def is_following(self) -> bool:
        """A standby whose handshake with the acting master is over."""
        following = self.state.following
        return following is not None and following.phase is Phase.FOLLOWING

    @property
    def is_in_sync(self) -> bool:
        record = self.state.record
        return record is not None and self.me.log_id in record.in_sync

    def remove(self, log_id: LogId) -> None:
        """Take a replica out of the group, until ``readmit``, or another master."""
        self.feed(ev.RemovalAsked(log_id))

    def readmit(self, log_id: LogId) -> None:
        """Let a replica that was taken out join again."""
        self.feed(ev.RemovalAsked(log_id, is_withdrawn=True))

    @property
    def trouble(self) -> str | None:
        """Why it takes no part in its group, or what keeps it from doing so well."""
        troubles = "; ".join(self.troubles.values())
        return self.failed or self.state.stop_reason or self._coordination.trouble or troubles or None

    def status(self) -> dict[str, Any]:
        """What the replica knows, for who looks for a fault, as plain values; ``firn status``: ``engine.status``."""
        state, record = self.state, self.state.record
        heard = state.heard if state.mastery is not None else {}
        return {
            "group": self.me.group_id, "log_id": self.me.log_id, "node": self.me.member.node, "role": state.role.value,
            "epoch": state.epoch, "version": record.version if record is not None else 0,
            "master": record.master.log_id if record is not None and record.master is not None else None,
            "in_sync": sorted(record.in_sync) if record is not None else [],
            "start": state.log.start, "written": state.log.written, "durable": state.log.durable,
            "committed": state.committed, "dispatched": state.dispatched, "is_unclean": state.stored.is_unclean,
            "lag_bytes": {log_id: max(0, state.log.written - found.durable) for log_id, found in heard.items()},
            "reason": self.trouble or "",
            "connections": self.peers.status(),
        }  # fmt: skip

    # After each step.

    def _settle(self) -> None:
        """Let go of who waits for what has come about."""
        if self._requests.successor is not None:
            self._settle_switchover()
        if self._left is not None and not self._left.done() and not self.is_in_sync:
            self._left.set_result(None)

    def _settle_switchover(self) -> None:
        state = self.state
        if state.record is not None:
            self._requests.note_master(state.record)
        if self._requests.successor == self.me.log_id and state.role not in (Role.CANDIDATE, Role.MASTER):
            self._requests.refuse_switchover(
                "the group changed meanwhile, or its coordinator did not answer; try again"
            )

    def _end(self, reason: str) -> None:
        """No further part in the group: everyone who waits is told."""
        self.failed = self.failed or reason
        for timer in (self._ticker, self._sync_due):
            if timer is not None:
                timer.cancel()
        self._streams.stop_all()
        self._tell_writes()
        self._events.clear()
        self._requests.time_out(reason)
        self._requests.refuse_switchover(reason)

    def fail(self, reason: str, *, is_bug: bool = False) -> None:
        """End this process's part in the group, for good and at once: only a new process takes part again."""
        if self.failed is None:
            log.error("group %s: this replica stops: %s", self.me.group_id, reason)
            self._end(reason)
            self._engine.stopped(reason, is_bug=is_bug)

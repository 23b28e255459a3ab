"""The driver of one replica: gives the core its events, carries out its actions.

Everything but small durable writes, cuts, syncs and reads of old log bytes runs on the event loop, run to
completion: an event is stepped, its actions carried out, what they bring about stepped, before anything else happens.

Invariants:

- events reach the core in the order in which they happened. Appends of one turn of the loop are one event, stepped
  at the end of the turn or right before any other event;
- actions are carried out in their order; those that take time (``StoreMeta``, ``CutLog``) one after another in one
  thread, the core orders nothing of the log until it knows of their end;
- a request that was told of by ``written`` ends exactly once: acknowledged, or with an unknown outcome (``requests``);
- a log that cannot be synced, a bug, or a damaged promise end this process's part in the group for good (``fail``).

Longer than other modules, because each action of the core and each question of the engine has its short method here;
what takes more than a few lines is a door's.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from firn.batch import Buffer
from firn.errors import FirnError, InvariantBroken, NotMaster, Timeout, Unavailable
from firn.types import Epoch, Position
from firn_node.clock import Clock, LogClock, Randomness
from firn_node.coordinator import Coordinator
from firn_node.disk import is_full
from firn_node.log import CommitLog
from firn_node.replication import core
from firn_node.replication import events as ev
from firn_node.replication.doors.codec import Arrived
from firn_node.replication.doors.coordination import Coordination
from firn_node.replication.doors.logdoor import LogDoor
from firn_node.replication.doors.logstream import LogStreams
from firn_node.replication.doors.peers import Dialling, Peers
from firn_node.replication.doors.startup import Folder
from firn_node.replication.doors.syncer import Syncer
from firn_node.replication.messages import Header, Report
from firn_node.replication.record import NEVER_FORCED, LogId
from firn_node.replication.requests import Requests, Wait
from firn_node.replication.rules import RULES
from firn_node.replication.serving import Engine
from firn_node.replication.state import NO_EPOCH, Me, Meta, Phase, Role, Timing

log = logging.getLogger("firn.replication")

_NO_READS = "the master may not answer reads yet: it has just been elected"
_FULL_DISK_RETRY_S = 1.0
_SWITCHOVER_TTLS = (
    4  # lease TTLs after which the outcome of a switchover counts as unknown; it needs two at most
)


@dataclass(frozen=True, slots=True)
class Doors:
    """What a driver is given; everything that is not a decision."""

    log: CommitLog
    folder: Folder
    coordinator: Coordinator
    engine: Engine
    clock: Clock
    log_clock: LogClock
    randomness: Randomness
    timing: Timing = field(default_factory=Timing)
    flush_interval_s: float = 0.0  # how long a write of ``flush: interval`` may stay unsynced
    dialling: Dialling = field(default_factory=Dialling)


class GroupDriver:
    """One replica while its process lives. Make it on the event loop, then ``start``; at the end ``stop``, once."""

    def __init__(self, me: Me, doors: Doors) -> None:
        self.me = me
        self._doors = doors
        self._log = doors.log
        self._engine = doors.engine
        self._loop = asyncio.get_running_loop()
        self._events: deque[tuple[ev.Event, Buffer]] = deque()  # with the bytes of a frame
        self._is_stepping = False
        self._data: Buffer = b""  # of the frame whose step runs
        self._log_bytes = 0  # that have come from the master, as of the last tick
        self._requests = Requests()
        self._streams = LogStreams(self._log, history=lambda: self.state.log.history, damaged=self.damaged)
        self._log_door = LogDoor(self._log, doors.folder.epoch_file, me, doors.log_clock)
        self._tasks: set[asyncio.Task[None]] = set()
        self._ticker: asyncio.TimerHandle | None = None
        self._sync_due: asyncio.TimerHandle | None = None
        self._left: asyncio.Future[None] | None = None  # done when this node is out of in_sync, as it asked
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="firn-group")
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
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if not was_failed and not self._log.is_broken:
            try:
                await self._in_worker(self._say_goodbye)
            except OSError as error:  # the next process finds no mark of a clean stop
                log.warning(
                    "group %s: the folder could not be told of a clean stop: %s", self.me.group_id, error
                )
        await asyncio.to_thread(self._worker.shutdown)

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
        before, self._data = self.state, data
        self.state, actions = core.step(before, event, self._now())
        self._carry_out(actions)
        if type(event) is ev.Written:
            self._wrote(event)
        if self.state.record is not before.record and self.state.record is not None:
            self.peers.keep(self.state.record.in_sync - {self.me.log_id})
        self._settle()
        if before.role is not self.state.role:
            log.info("group %s: %s -> %s", self.me.group_id, before.role.value, self.state.role.value)

    def _carry_out(self, actions: tuple[ev.Action, ...]) -> None:
        for action in actions:
            if self.failed is not None:
                return
            _ACTIONS[type(action)](self, action)

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
        if core.master_address(state) is None:
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

    def not_master(self) -> FirnError:
        return NotMaster("this node is not the master of the group", address=core.master_address(self.state))

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
        await self._in_worker(lambda: self._doors.folder.epoch_file.store(history, Position(position)))

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

    # Actions.

    def _send(self, action: ev.Send) -> None:
        self.peers.send(action.to, action.message)

    def _read_record(self, action: ev.ReadRecord) -> None:
        self._coordination.read(action)

    def _compare_and_set(self, action: ev.CompareAndSet) -> None:
        self._coordination.compare_and_set(action)

    def _store_meta(self, action: ev.StoreMeta) -> None:
        stored = self._in_worker(lambda: self._doors.folder.group_file.store(action.meta))

        async def tell() -> None:
            await self._until_stored(stored, action.meta)
            self.feed(ev.MetaStored(action.meta))

        self._spawn(tell())

    async def _until_stored(self, stored: "asyncio.Future[None]", meta: Meta) -> None:
        """A full disk is waited for: until a promise is durable the core does nothing that relies on it."""
        while True:
            try:
                await stored
            except OSError as error:
                if not is_full(error):
                    raise
                self.troubles["promises"] = f"what is promised to the group cannot be stored: {error}"
                await asyncio.sleep(_FULL_DISK_RETRY_S)
                stored = self._in_worker(lambda: self._doors.folder.group_file.store(meta))
            else:
                self.troubles.pop("promises", None)
                return

    def _append_epoch_start(self, action: ev.AppendEpochStart) -> None:
        """What a full disk does not take is ordered again, at the next tick."""
        try:
            written = self._log_door.append_epoch_start(action.epoch)
        except OSError as error:
            if self._log.is_broken or not is_full(error):
                self.fail(f"the epoch-start record could not be written: {error}")
            self.troubles["epoch start"] = f"the epoch-start record cannot be written: {error}"
            return
        self.troubles.pop("epoch start", None)
        self._events.appendleft((written, b""))

    def _load_state(self, action: ev.LoadState) -> None:
        self._spawn(self._load(action.epoch))

    async def _load(self, epoch: Epoch) -> None:
        await self._engine.load_state(epoch)
        self.feed(ev.StateLoaded(epoch))

    def _write_frame(self, action: ev.WriteFrame) -> None:
        """Append what has just arrived. What cannot be appended leaves a gap, after which the core asks anew."""
        try:
            written = self._log_door.append_frame(action.frame, self._data, after=self.state.log.last_epoch)
        except InvariantBroken:
            raise
        except (FirnError, OSError) as error:
            self._refuse_frame(action.frame.header.log_id, error)
            return
        self.troubles.pop("frame", None)
        self._events.appendleft((written, b""))

    def _refuse_frame(self, master: LogId, error: FirnError | OSError) -> None:
        what = error.message if isinstance(error, FirnError) else str(error)
        if self._log.is_broken:
            self.fail(f"the commit log is broken: {what}")
            return
        if self.troubles.get("frame") != what:
            log.warning("group %s: a frame of %s was not appended: %s", self.me.group_id, master, what)
        self.troubles["frame"] = f"nothing is appended: {what}"

    def _cut_log(self, action: ev.CutLog) -> None:
        """1. forget in the engine, 2. cut, durably, 3. tell. A sync that begins before 2. has ended proves nothing."""
        self._engine.cut(action.end)
        history = self.state.log.history
        done = self._in_worker(lambda: self._log_door.cut(history, action.end))

        async def tell() -> None:
            await done
            self.feed(ev.LogCut(action.end))

        self._spawn(tell())

    def _begin_log(self, action: ev.BeginLog) -> None:
        try:
            self._log_door.begin(action.start)
            self._syncer.void()
        except OSError as error:
            self.fail(f"the log could not begin at {action.start}: {error}")
            return
        self._engine.begin(action.start)

    def _start_stream(self, action: ev.StartStream) -> None:
        header = Header(self.me.group_id, action.epoch, self.me.log_id, action.handshake)
        self._streams.start(action.to, self.peers.stream_to(action.to), header, action.start)

    def _stop_stream(self, action: ev.StopStream) -> None:
        self._streams.stop(action.to)

    def _stop_streams(self, action: ev.StopStreams) -> None:
        self._streams.stop_all()

    def _acknowledge(self, action: ev.Acknowledge) -> None:
        self._requests.acknowledge(action.tickets)

    def _end_requests(self, action: ev.EndRequests) -> None:
        self._requests.time_out(action.reason)
        self._engine.stepped_down(action.reason)

    def _dispatch_to(self, action: ev.DispatchTo) -> None:
        self._events.append((ev.Dispatched(self._engine.dispatch(action.position)), b""))

    def _rebuild(self, action: ev.Rebuild) -> None:
        self._engine.rebuild(action.reason, keeps_tail=action.keeps_tail)

    def _switchover_ended(self, action: ev.SwitchoverEnded) -> None:
        if not self._requests.refuse_switchover(action.reason):
            log.warning("group %s: %s", self.me.group_id, action.reason)

    def _stopped(self, action: ev.Stop) -> None:
        """The core has ended; what it ordered behind this, such as a rebuild, is still carried out."""
        log.error("group %s: this replica stops: %s", self.me.group_id, action.reason)
        self._engine.stopped(action.reason, is_bug=action.is_bug)

    # Work that takes time.

    def _in_worker(self, work: Callable[[], None]) -> "asyncio.Future[None]":
        return self._loop.run_in_executor(self._worker, work)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task: asyncio.Task[None] = self._loop.create_task(self._guarded(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _guarded(self, work: Coroutine[Any, Any, None]) -> None:
        """The boundary of one task: what fails here ends the replica's part in the group."""
        try:
            await work
        except Exception as error:
            log.exception("group %s", self.me.group_id)
            self.fail(error.message if isinstance(error, FirnError) else repr(error))


_ACTIONS: dict[type, Callable[[GroupDriver, Any], None]] = {
    ev.Send: GroupDriver._send,
    ev.ReadRecord: GroupDriver._read_record,
    ev.CompareAndSet: GroupDriver._compare_and_set,
    ev.StoreMeta: GroupDriver._store_meta,
    ev.AppendEpochStart: GroupDriver._append_epoch_start,
    ev.LoadState: GroupDriver._load_state,
    ev.WriteFrame: GroupDriver._write_frame,
    ev.CutLog: GroupDriver._cut_log,
    ev.BeginLog: GroupDriver._begin_log,
    ev.StartStream: GroupDriver._start_stream,
    ev.StopStream: GroupDriver._stop_stream,
    ev.StopStreams: GroupDriver._stop_streams,
    ev.Acknowledge: GroupDriver._acknowledge,
    ev.EndRequests: GroupDriver._end_requests,
    ev.DispatchTo: GroupDriver._dispatch_to,
    ev.Rebuild: GroupDriver._rebuild,
    ev.SwitchoverEnded: GroupDriver._switchover_ended,
    ev.Stop: GroupDriver._stopped,
}

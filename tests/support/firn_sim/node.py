"""The driver of a simulated node: gives the core its events, carries out its actions, with delays and deaths.

A node is a machine with a data folder (``Folder``: what survives a dead process) and, while it runs, a process
(``state`` and all that a death takes along). A paused process takes no step; what happens meanwhile waits. Time
is the machine's own clock, fast or slow by a constant rate.
"""

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

from firn_sim.coordinator import SimCoordinator
from firn_sim.network import SimNetwork
from firn_sim.replicalog import EPOCH_START, Entry, Map, ReplicaLog, apply, epoch_starts
from firn_sim.world import World

from firn.types import Epoch, Position
from firn_node.replication import core
from firn_node.replication import events as ev
from firn_node.replication.messages import Frame, Handshake, Header
from firn_node.replication.record import GroupId, Incarnation, LogId, Member
from firn_node.replication.rules import Rules
from firn_node.replication.state import (
    LOG_BEGIN,
    LogView,
    Me,
    Meta,
    OpenWrite,
    Phase,
    Role,
    Startup,
    State,
    Timing,
)

GROUP = GroupId("orders-0")
FRAME_ENTRIES_MAX = 64


@dataclass(slots=True)
class Folder:
    """The durable side of a node."""

    log_id: LogId
    log: ReplicaLog
    meta: Meta = field(default_factory=Meta)
    compacted: Map = field(default_factory=dict)  # by key, of what the log has no more
    checkpoint: int = 0  # committed and dispatched up to there, durably
    was_shut_down: bool = False  # the mark of a clean stop
    has_lost_tail: bool = False  # ghost: what was only written may be gone (cleared by a clean meta)


@dataclass(slots=True)
class DiskFaults:
    """Seconds that a sync, a cut or a small durable write takes."""

    sync: tuple[float, float] = (0.0005, 0.01)
    factor: float = 1.0
    slowest: float = 2.0


Payload = tuple[Entry, ...]  # what travels beside a frame


@dataclass(slots=True)
class Stream:
    handshake: Handshake
    epoch: Epoch
    next: int


@dataclass(slots=True)
class Read:
    barrier: int
    seen: int


@dataclass(frozen=True, slots=True)
class Options:
    """What a group of this simulation is like. ``keeps_log_id`` breaks rule 9, the two ``forgets_`` rules 5 and 1,
    ``reads_at_once`` rule 18."""

    timing: Timing = field(default_factory=Timing)
    has_interval: bool = False
    largest_min_in_sync: int = 1
    keeps_log_id: bool = False
    forgets_epoch: bool = False
    forgets_version: bool = False
    reads_at_once: bool = False


class Watcher(Protocol):
    """Who is told what a node did: the checkers and the clients."""

    def stepped(self, node: "SimNode", before: State | None) -> None: ...

    def acknowledged(self, node: "SimNode", tickets: tuple[int, ...]) -> None: ...

    def committed_chain(self, position: int) -> int:
        """The hash of what is committed before a position."""
        ...

    def committed_map(self, position: int) -> Map:
        """By key, what is committed before a position."""
        ...

    def ended(self, node: "SimNode") -> None: ...

    def stopped(self, node: "SimNode", action: ev.Stop) -> None: ...


class SimNode:
    def __init__(
        self, name: str, ordinal: int, *, world: World, network: SimNetwork, coordinator: SimCoordinator,
        rng: random.Random, options: Options, rules: Rules, make_log: Callable[..., ReplicaLog],
    ) -> None:  # fmt: skip
        self.name = name
        self.ordinal = ordinal
        self.world, self.network, self.coordinator = world, network, coordinator
        self.rng, self.options, self.rules = rng, options, rules
        self.disk = DiskFaults()
        self.rate = 1.0
        self.offset = rng.uniform(0, 1000)
        self.peers: dict[LogId, SimNode] = {}  # by log_id, of all nodes; shared
        self.watcher: Watcher | None = None
        self.boots = 1
        self.life = 0
        self.is_paused = False
        self.state: State | None = None
        self.make_log = make_log
        self.reads: list[Read] = []
        self._incarnations = 0
        self._log_ids = 0
        self._waiting: list[tuple[ev.Event, Payload | None]] = []
        self.folder = self._new_folder()
        coordinator.watchers[name] = self._watched

    # The machine.

    @property
    def now(self) -> float:
        return self.offset + self.world.now * self.rate

    @property
    def is_up(self) -> bool:
        return self.state is not None

    def _new_folder(self) -> Folder:
        if self._log_ids == 0 or not self.options.keeps_log_id:
            self._log_ids += 1
        folder = Folder(LogId(f"{self.name}.{self._log_ids}"), self.make_log(start=0, chain=0))
        if self.options.keeps_log_id and self.world.now > 0:
            folder.meta = Meta(is_rebuilt=True)
        self.peers[folder.log_id] = self
        return folder

    def start(self) -> None:
        """A new process opens the folder."""
        if self.state is not None:
            return
        folder = self.folder
        log = folder.log
        log.recover()
        self.life += 1
        self._incarnations += 1
        me = Me(
            GROUP, folder.log_id, Incarnation(f"{self.name}/{self._incarnations}"),
            Member(self.name, self.name, self.ordinal),
        )  # fmt: skip
        startup = Startup(
            meta=folder.meta, log=log_view(log), committed=Position(folder.checkpoint),
            largest_min_in_sync=self.options.largest_min_in_sync, boot_id=f"{self.name}#{self.boots}",
            has_interval=self.options.has_interval, old_process_is_dead=self.rng.random() < 0.8,
            was_shut_down=folder.was_shut_down,
        )  # fmt: skip
        folder.was_shut_down = False
        self._events: deque[ev.Event] = deque()
        self._is_busy = False
        self._is_syncing = False
        self._streams: dict[LogId, Stream] = {}
        self._stored_at = 0.0
        self._payload: Payload | None = None
        self._answered: set[int] = set()
        self._waiting.clear()
        self.reads.clear()
        self.is_paused = False
        state, actions = core.start(me, startup, self.options.timing, self.now, self.rules)
        self.state = state
        if self.watcher is not None:
            self.watcher.stepped(self, None)
        for action in actions:
            self._act(action)
        self._tick(self.life)

    def kill(self) -> None:
        """The process dies; the page cache lives."""
        self._die()
        self.folder.log.kill()

    def shut_down(self) -> None:
        """The process ends in order; often the machine does too, and comes back by another boot."""
        if self.state is None:
            return
        log, meta = self.folder.log, self.state.wanted
        log.synced(log.written, log.cuts)
        self._stored(meta)
        self.folder.was_shut_down = True
        self._die()
        if self.rng.random() < 0.5:
            self.boots += 1
            log.lose_power(self.rng)
        else:
            log.kill()

    def lose_power(self) -> None:
        """The machine dies: what was not synced is gone, in part or whole."""
        self._die()
        self.boots += 1
        self.folder.log.lose_power(self.rng)
        if self.options.has_interval:
            self.folder.has_lost_tail = True
        if self.options.forgets_epoch:
            history = self.folder.log.history()
            epoch = history[-1].epoch if history else Epoch(0)
            self.folder.meta = replace(self.folder.meta, epoch=epoch, version=0)
        if self.options.forgets_version:
            self.folder.meta = replace(self.folder.meta, version=0)

    def lose_disk(self) -> None:
        self._die()
        self.boots += 1
        self._wipe()

    def _wipe(self) -> None:
        self.peers.pop(self.folder.log_id, None)
        self.folder = self._new_folder()

    def _die(self) -> None:
        self.state = None
        self.life += 1
        self.is_paused = False
        self._waiting.clear()
        self.reads.clear()

    def pause(self) -> None:
        self.is_paused = self.is_up

    def resume(self) -> None:
        if not self.is_paused:
            return
        self.is_paused = False
        waiting, self._waiting = self._waiting, []
        for event, payload in waiting:
            self.feed(event, payload)

    # Events.

    def _tick(self, life: int) -> None:
        if life != self.life:
            return
        self.feed(ev.Tick(), is_tick=True)
        period = self.options.timing.tick * self.rng.uniform(0.8, 1.0) / self.rate
        self.world.at(period, partial(self._tick, life))

    def feed(self, event: ev.Event, payload: Payload | None = None, *, is_tick: bool = False) -> None:
        """One event, and whatever its actions bring about at once."""
        if self.state is None:
            return
        if self.is_paused:
            if not is_tick:
                self._waiting.append((event, payload))
            return
        self._payload = payload
        self._events.append(event)
        if self._is_busy:
            return
        self._is_busy = True
        while self._events and self.state is not None:
            before = self.state
            self.state, actions = core.step(before, self._events.popleft(), self.now, self.rules)
            if self.watcher is not None:
                self.watcher.stepped(self, before)
            for action in actions:
                self._act(action)
        self._is_busy = False
        if self.state is not None:
            self._pump()
            self._sync()

    def _later(self, delay: float, event: ev.Event) -> None:
        life = self.life

        def arrive() -> None:
            if life == self.life:
                self.feed(event)

        self.world.at(delay, arrive)

    def receive(self, message: tuple[Any, Payload | None]) -> None:
        self.feed(ev.Received(message[0]), message[1])

    def _watched(self, read: ev.RecordRead) -> None:
        self.feed(read)

    # Actions.

    def _act(self, action: ev.Action) -> None:
        handle = _ACTIONS[type(action)]
        handle(self, action)

    def _send(self, action: ev.Send) -> None:
        self._post(action.to, action.message, None)

    def _post(self, to: LogId, message: Any, payload: Payload | None) -> None:
        peer = self.peers.get(to)
        if peer is None:
            return

        def deliver(item: tuple[Any, Payload | None]) -> None:
            if peer.folder.log_id == to:
                peer.receive(item)

        self.network.send(self.name, peer.name, deliver, (message, payload))

    def _read_record(self, action: ev.ReadRecord) -> None:
        life = self.life
        self.coordinator.read(
            self.name, action.at_least, lambda read: self.feed(read) if life == self.life else None
        )

    def _compare_and_set(self, action: ev.CompareAndSet) -> None:
        life, number = self.life, self.rng.getrandbits(60)

        def answer(answered: ev.SwapAnswered) -> None:
            if life == self.life and number not in self._answered:
                self._answered.add(number)
                self.feed(answered)

        self.coordinator.compare_and_set(self.name, action.expected, action.new, answer)
        give_up = partial(answer, ev.SwapAnswered(action.new, ev.Outcome.UNKNOWN))
        self.world.at(self.options.timing.swap_timeout * 0.9, give_up)

    def _disk_delay(self) -> float:
        return min(self.rng.uniform(*self.disk.sync) * self.disk.factor, self.disk.slowest)

    def _store_meta(self, action: ev.StoreMeta) -> None:
        life = self.life

        def done() -> None:
            if life != self.life:
                return
            self._stored(action.meta)
            self.feed(ev.MetaStored(action.meta))

        self._stored_at = max(self._stored_at, self.world.now) + self._disk_delay()
        self.world.at(self._stored_at - self.world.now, done)

    def _stored(self, meta: Meta) -> None:
        self.folder.meta = meta
        if not meta.is_unclean and meta.boot_id == f"{self.name}#{self.boots}":
            self.folder.has_lost_tail = False

    def _append_epoch_start(self, action: ev.AppendEpochStart) -> None:
        log = self.folder.log
        entries = [log.entry(action.epoch, EPOCH_START)]
        starts = epoch_starts(entries, log.written)
        log.append(entries)
        self._events.append(ev.Written(Position(log.written), starts))

    def _load_state(self, action: ev.LoadState) -> None:
        self._later(self.rng.uniform(0.001, 0.1), ev.StateLoaded(action.epoch))

    def _write_frame(self, action: ev.WriteFrame) -> None:
        payload, log = self._payload, self.folder.log
        assert payload is not None, "a frame is written in the step that received it"
        assert action.frame.start == log.written, "a frame continues the log"
        log.append(payload)
        self._events.appendleft(ev.Written(Position(log.written), action.frame.starts))

    def _cut_log(self, action: ev.CutLog) -> None:
        life = self.life

        def done() -> None:
            if life == self.life:
                self.folder.log.cut(action.end)
                self.feed(ev.LogCut(action.end))

        self.world.at(self._disk_delay(), done)

    def _begin_log(self, action: ev.BeginLog) -> None:
        """What precedes is pulled by key instead: retention removes only what is committed."""
        chain = self.watcher.committed_chain(action.start) if self.watcher is not None else 0
        self.folder.log = self.make_log(start=action.start, chain=chain)
        self.folder.compacted = self.watcher.committed_map(action.start) if self.watcher is not None else {}

    def _start_stream(self, action: ev.StartStream) -> None:
        """None for a standby whose next bytes retention has removed since its Hello: it asks anew."""
        if action.start >= self.folder.log.start:
            self._streams[action.to] = Stream(action.handshake, action.epoch, action.start)

    def _stop_stream(self, action: ev.StopStream) -> None:
        self._streams.pop(action.to, None)

    def _stop_streams(self, action: ev.StopStreams) -> None:
        self._streams.clear()

    def _pump(self) -> None:
        """Send every standby what is new: also what is not yet durable here."""
        log = self.folder.log
        for to, stream in self._streams.items():
            while stream.next < log.written:
                end = log.frame_end(stream.next, FRAME_ENTRIES_MAX)
                entries = log.between(stream.next, end)
                header = Header(GROUP, stream.epoch, self.folder.log_id, stream.handshake)
                starts = epoch_starts(entries, stream.next)
                frame = Frame(header, Position(stream.next), Position(end), starts)
                self._post(to, frame, tuple(entries))
                stream.next = end

    def _sync(self) -> None:
        """One sync at a time, for as long as something is not durable."""
        log = self.folder.log
        if self._is_syncing or log.durable >= log.written:
            return
        self._is_syncing = True
        life, end, cuts = self.life, log.written, log.cuts

        def done() -> None:
            if life == self.life:
                self._is_syncing = False
                log.synced(end, cuts)
                self.feed(ev.Durable(Position(end), cuts))
                if self.state is not None and not self.is_paused:
                    self._sync()

        self.world.at(self._disk_delay(), done)

    def _acknowledge(self, action: ev.Acknowledge) -> None:
        if self.watcher is not None:
            self.watcher.acknowledged(self, action.tickets)

    def _end_requests(self, action: ev.EndRequests) -> None:
        self.reads.clear()
        if self.watcher is not None:
            self.watcher.ended(self)

    def _dispatch_to(self, action: ev.DispatchTo) -> None:
        self._later(self.rng.uniform(0.0005, 0.02), ev.Dispatched(action.position))

    def _rebuild(self, action: ev.Rebuild) -> None:
        """A new log_id in an empty folder, by a new process."""
        self._die()
        self._wipe()
        life = self.life
        self.world.at(self.rng.uniform(0.05, 0.5), lambda: self.start() if life == self.life else None)

    def _switchover_ended(self, action: ev.SwitchoverEnded) -> None:
        pass

    def _stop(self, action: ev.Stop) -> None:
        if self.watcher is not None:
            self.watcher.stopped(self, action)

    # What clients and retention do at a node.

    def write(self, entries: list[Entry], ticket: int, min_in_sync: int, *, is_interval: bool) -> bool:
        """Append, if the core lets it."""
        state = self.state
        if state is None or self.is_paused or state.mastery is None:
            return False
        if core.write_refusal(state, self.now, min_in_sync, self.rules) is not None:
            return False
        end = self.folder.log.append([entry._replace(epoch=state.mastery.epoch) for entry in entries])
        write = OpenWrite(ticket, Position(end), min_in_sync, is_interval)
        self.feed(ev.Written(Position(end), (), (write,)))
        return True

    def read(self, seen: int) -> None:
        """A read arrives; it is answered by ``answered_reads`` once its barrier is dispatched."""
        state = self.state
        if state is not None and not self.is_paused and core.may_read(state, self.now, self.rules):
            self.reads.append(Read(0 if self.options.reads_at_once else read_barrier(state), seen))

    def answered_reads(self) -> list[tuple[int, int]]:
        """(position read, highest position known to anyone when the read arrived) of reads that end now."""
        state = self.state
        if state is None or not self.reads or not core.may_read(state, self.now, self.rules):
            return []
        done = [read for read in self.reads if state.dispatched >= read.barrier]
        if done:
            self.reads = [read for read in self.reads if state.dispatched < read.barrier]
        return [(state.dispatched, read.seen) for read in done]

    def read_here(self, floor: int) -> int | None:
        """A read that any replica may answer (rule 17): the position that a standby shows to who was shown ``floor``.

        None: it is not to answer, or has not dispatched so far.
        """
        state = self.state
        if state is None or self.is_paused or state.role is not Role.STANDBY or state.following is None:
            return None
        is_behind = state.following.phase is not Phase.FOLLOWING or state.dispatched < floor
        return None if is_behind else state.dispatched

    def map(self, end: int) -> Map:
        """By key, everything that is here before a position."""
        log = self.folder.log
        return apply(dict(self.folder.compacted), log.records(log.start, end))

    def release(self, before: int) -> None:
        if self.state is not None and not self.is_paused:
            held = min((stream.next for stream in self._streams.values()), default=before)
            log, start = self.folder.log, self.folder.log.start
            # Read before they go, as a compaction does; by the same bytes, how far they go is known afterwards.
            records = log.records(start, log.durable)
            log.release(min(before, held, self.state.dispatched))
            left = log.records(log.start, log.durable)
            apply(self.folder.compacted, records[: len(records) - len(left)])
            self.folder.checkpoint = max(self.folder.checkpoint, self.state.dispatched)
            self.feed(ev.Released(Position(self.folder.log.start)))

    def note_rebuilt(self) -> None:
        """A blank node that follows has pulled everything else."""
        state = self.state
        if state is None or self.is_paused or state.role is not Role.BLANK or state.following is None:
            return
        if state.following.phase is Phase.FOLLOWING and not state.log.is_empty:
            self.feed(ev.Rebuilt())


def read_barrier(state: State) -> Position:
    """Rule 18: a read that arrives now is answered once so much is committed and dispatched.

    The broker's engine waits for the part of it that its partition has (``engine.reader.Reader.settle``).
    """
    acknowledged = state.mastery.acknowledged if state.mastery is not None else LOG_BEGIN
    return max(state.committed, acknowledged)


def log_view(log: ReplicaLog) -> LogView:
    return LogView(Position(log.start), Position(log.written), Position(log.durable), log.history())


_ACTIONS: dict[type, Callable[[SimNode, Any], None]] = {
    ev.Send: SimNode._send,
    ev.ReadRecord: SimNode._read_record,
    ev.CompareAndSet: SimNode._compare_and_set,
    ev.StoreMeta: SimNode._store_meta,
    ev.AppendEpochStart: SimNode._append_epoch_start,
    ev.LoadState: SimNode._load_state,
    ev.WriteFrame: SimNode._write_frame,
    ev.CutLog: SimNode._cut_log,
    ev.BeginLog: SimNode._begin_log,
    ev.StartStream: SimNode._start_stream,
    ev.StopStream: SimNode._stop_stream,
    ev.StopStreams: SimNode._stop_streams,
    ev.Acknowledge: SimNode._acknowledge,
    ev.EndRequests: SimNode._end_requests,
    ev.DispatchTo: SimNode._dispatch_to,
    ev.Rebuild: SimNode._rebuild,
    ev.SwitchoverEnded: SimNode._switchover_ended,
    ev.Stop: SimNode._stop,
}

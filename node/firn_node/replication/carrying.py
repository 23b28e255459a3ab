"""How each action of the core is carried out, by the doors; what it brings about is told to the core as an event.

Invariants:

- actions are carried out in their order; those that take time (``StoreMeta``, ``CutLog``) one after another in one
  thread, the core orders nothing of the log until it knows of their end;
- what an action has written to the log is the very next event.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from firn.batch import Buffer
from firn.errors import FirnError, InvariantBroken
from firn.types import Epoch
from firn_node.disk import is_full
from firn_node.replication import events as ev
from firn_node.replication.doors.coordination import Coordination
from firn_node.replication.doors.given import Doors
from firn_node.replication.doors.logdoor import LogDoor
from firn_node.replication.doors.logstream import LogStreams
from firn_node.replication.doors.peers import Peers
from firn_node.replication.doors.syncer import Syncer
from firn_node.replication.messages import Header
from firn_node.replication.record import LogId
from firn_node.replication.requests import Requests
from firn_node.replication.state import Me, Meta, State
from firn_node.replication.work import Work

log = logging.getLogger("firn.replication")

_FULL_DISK_RETRY_S = 1.0


class Host(Protocol):
    """The driver."""

    state: State
    data: Buffer  # of the frame whose step runs
    troubles: dict[str, str]

    def feed(self, event: ev.Event) -> None: ...
    def feed_first(self, event: ev.Event) -> None:
        """Step it before all that waits."""
        ...

    def feed_last(self, event: ev.Event) -> None:
        """Step it after all that waits."""
        ...

    def fail(self, reason: str) -> None: ...


@dataclass(frozen=True, slots=True)
class Tools:
    """What a driver has made for one replica."""

    peers: Peers
    coordination: Coordination
    log_door: LogDoor
    streams: LogStreams
    syncer: Syncer
    requests: Requests
    work: Work


class Carrying:
    def __init__(self, me: Me, doors: Doors, tools: Tools, host: Host) -> None:
        self._me = me
        self._doors = doors
        self._tools = tools
        self._host = host

    def out(self, action: ev.Action) -> None:
        """Carry an action out, or begin to."""
        _ACTIONS[type(action)](self, action)

    def _send(self, action: ev.Send) -> None:
        self._tools.peers.send(action.to, action.message)

    def _read_record(self, action: ev.ReadRecord) -> None:
        self._tools.coordination.read(action)

    def _compare_and_set(self, action: ev.CompareAndSet) -> None:
        self._tools.coordination.compare_and_set(action)

    def _store_meta(self, action: ev.StoreMeta) -> None:
        stored = self._tools.work.in_thread(lambda: self._doors.folder.group_file.store(action.meta))

        async def tell() -> None:
            await self._until_stored(stored, action.meta)
            self._host.feed(ev.MetaStored(action.meta))

        self._tools.work.spawn(tell())

    async def _until_stored(self, stored: "asyncio.Future[None]", meta: Meta) -> None:
        """A full disk is waited for: until a promise is durable the core does nothing that relies on it."""
        while True:
            try:
                await stored
            except OSError as error:
                if not is_full(error):
                    raise
                self._host.troubles["promises"] = f"what is promised to the group cannot be stored: {error}"
                await asyncio.sleep(_FULL_DISK_RETRY_S)
                stored = self._tools.work.in_thread(lambda: self._doors.folder.group_file.store(meta))
            else:
                self._host.troubles.pop("promises", None)
                return

    def _append_epoch_start(self, action: ev.AppendEpochStart) -> None:
        """What a full disk does not take is ordered again, at the next tick."""
        try:
            written = self._tools.log_door.append_epoch_start(action.epoch)
        except OSError as error:
            if self._doors.log.is_broken or not is_full(error):
                self._host.fail(f"the epoch-start record could not be written: {error}")
            self._host.troubles["epoch start"] = f"the epoch-start record cannot be written: {error}"
            return
        self._host.troubles.pop("epoch start", None)
        self._host.feed_first(written)

    def _load_state(self, action: ev.LoadState) -> None:
        self._tools.work.spawn(self._load(action.epoch))

    async def _load(self, epoch: Epoch) -> None:
        await self._doors.engine.load_state(epoch)
        self._host.feed(ev.StateLoaded(epoch))

    def _write_frame(self, action: ev.WriteFrame) -> None:
        """Append what has just arrived. What cannot be appended leaves a gap, after which the core asks anew."""
        try:
            written = self._tools.log_door.append_frame(
                action.frame, self._host.data, after=self._host.state.log.last_epoch
            )
        except InvariantBroken:
            raise
        except (FirnError, OSError) as error:
            self._refuse_frame(action.frame.header.log_id, error)
            return
        self._host.troubles.pop("frame", None)
        self._host.feed_first(written)

    def _refuse_frame(self, master: LogId, error: FirnError | OSError) -> None:
        what = error.message if isinstance(error, FirnError) else str(error)
        if self._doors.log.is_broken:
            self._host.fail(f"the commit log is broken: {what}")
            return
        if self._host.troubles.get("frame") != what:
            log.warning("group %s: a frame of %s was not appended: %s", self._me.group_id, master, what)
        self._host.troubles["frame"] = f"nothing is appended: {what}"

    def _cut_log(self, action: ev.CutLog) -> None:
        """1. forget in the engine, 2. cut, durably, 3. tell. A sync that begins before 2. has ended proves nothing."""
        self._doors.engine.cut(action.end)
        history = self._host.state.log.history
        done = self._tools.work.in_thread(lambda: self._tools.log_door.cut(history, action.end))

        async def tell() -> None:
            await done
            self._host.feed(ev.LogCut(action.end))

        self._tools.work.spawn(tell())

    def _begin_log(self, action: ev.BeginLog) -> None:
        try:
            self._tools.log_door.begin(action.start)
            self._tools.syncer.void()
        except OSError as error:
            self._host.fail(f"the log could not begin at {action.start}: {error}")
            return
        self._doors.engine.begin(action.start)

    def _start_stream(self, action: ev.StartStream) -> None:
        header = Header(self._me.group_id, action.epoch, self._me.log_id, action.handshake)
        self._tools.streams.start(action.to, self._tools.peers.stream_to(action.to), header, action.start)

    def _stop_stream(self, action: ev.StopStream) -> None:
        self._tools.streams.stop(action.to)

    def _stop_streams(self, action: ev.StopStreams) -> None:
        self._tools.streams.stop_all()

    def _acknowledge(self, action: ev.Acknowledge) -> None:
        self._tools.requests.acknowledge(action.tickets)

    def _end_requests(self, action: ev.EndRequests) -> None:
        self._tools.requests.time_out(action.reason)
        self._doors.engine.stepped_down(action.reason)

    def _dispatch_to(self, action: ev.DispatchTo) -> None:
        self._host.feed_last(ev.Dispatched(self._doors.engine.dispatch(action.position)))

    def _rebuild(self, action: ev.Rebuild) -> None:
        self._doors.engine.rebuild(action.reason, keeps_tail=action.keeps_tail)

    def _switchover_ended(self, action: ev.SwitchoverEnded) -> None:
        if not self._tools.requests.refuse_switchover(action.reason):
            log.warning("group %s: %s", self._me.group_id, action.reason)

    def _stopped(self, action: ev.Stop) -> None:
        """The core has ended; what it ordered behind this, such as a rebuild, is still carried out."""
        log.error("group %s: this replica stops: %s", self._me.group_id, action.reason)
        self._doors.engine.stopped(action.reason, is_bug=action.is_bug)


_ACTIONS: dict[type, Callable[[Carrying, Any], None]] = {
    ev.Send: Carrying._send,
    ev.ReadRecord: Carrying._read_record,
    ev.CompareAndSet: Carrying._compare_and_set,
    ev.StoreMeta: Carrying._store_meta,
    ev.AppendEpochStart: Carrying._append_epoch_start,
    ev.LoadState: Carrying._load_state,
    ev.WriteFrame: Carrying._write_frame,
    ev.CutLog: Carrying._cut_log,
    ev.BeginLog: Carrying._begin_log,
    ev.StartStream: Carrying._start_stream,
    ev.StopStream: Carrying._stop_stream,
    ev.StopStreams: Carrying._stop_streams,
    ev.Acknowledge: Carrying._acknowledge,
    ev.EndRequests: Carrying._end_requests,
    ev.DispatchTo: Carrying._dispatch_to,
    ev.Rebuild: Carrying._rebuild,
    ev.SwitchoverEnded: Carrying._switchover_ended,
    ev.Stop: Carrying._stopped,
}

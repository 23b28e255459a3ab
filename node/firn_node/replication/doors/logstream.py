"""The log on its way to one standby: read in pieces from a position, following the written end, pipelined.

Frames are of whole batches, up to 1 MiB or one larger batch. They leave without waiting for answers, up to
64 MiB past what the standby has reported durable: that bounds what it has to sync, and keeps a link of
100 ms and 1 Gbit/s full (12.5 MB under way, and as much being synced). What was written lately is in the page cache
and read at once; what is older is read in a thread, because a disk may have to be waited for.

A held position keeps retention away from what the standby has yet to get, and for a while after its stream has ended:
one that restarts, or is being rebuilt, would have to start anew otherwise. A full disk ends such a hold. Nothing is
copied in this process: the bytes that ``pread`` returns are those that the transport writes.
"""

import asyncio
import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass

from firn.errors import Corrupt, OffsetExpired
from firn.types import Position
from firn_node.log import CommitLog, Hold
from firn_node.replication.doors.codec import PIECE_BYTES, frame_parts, more_parts
from firn_node.replication.doors.connection import Connection
from firn_node.replication.messages import Frame, Header, History, Report
from firn_node.replication.record import LogId

log = logging.getLogger("firn.replication")


@dataclass(frozen=True, slots=True)
class Sizes:
    """``piece``: of the log in one frame. ``window``: sent and not reported durable. ``hot``: read without a thread."""

    piece: int = PIECE_BYTES
    window: int = 64 << 20
    hot: int = 16 << 20


SIZES = Sizes()
LINGER_S = 300.0  # how long a standby that is away finds the log where it left it


class LogStream:
    """``history``: the log's epochs as known now. ``damaged``: called when the log itself cannot be read."""

    def __init__(
        self, commit_log: CommitLog, connection: Connection, header: Header, start: Position, *,
        history: Callable[[], History], damaged: Callable[[str], None], sizes: Sizes = SIZES,
    ) -> None:  # fmt: skip
        """``hold`` outlives it: whoever ends the stream lets go of that."""
        self.header = header
        self.next = start
        self._log = commit_log
        self._connection = connection
        self._history = history
        self._damaged = damaged
        self._sizes = sizes
        self._durable = start
        self.hold = commit_log.hold(start)
        self._stirred = asyncio.Event()
        self._task = asyncio.create_task(self._run(), name=f"firn log stream to {header.handshake}")

    def wrote(self) -> None:
        """The log has grown."""
        self._stirred.set()

    def reported(self, durable: Position) -> None:
        """The standby has synced up to there."""
        if durable > self._durable:
            self._durable = durable
            self.hold.move(durable)
            self._stirred.set()

    def stop(self) -> None:
        self._task.cancel()

    async def _run(self) -> None:
        try:
            while True:
                self._stirred.clear()
                while self.next < self._log.written_end and self.next - self._durable < self._sizes.window:
                    await self._send(*await self._read())
                await self._stirred.wait()
        except ConnectionError:
            pass  # the standby dials again
        except OffsetExpired as error:
            log.warning("the log stream to %s ends: %s", self.header.handshake, error.message)
        except Corrupt as error:
            self._damaged(error.message)

    async def _read(self) -> tuple[Position, bytes]:
        end = self._log.written_end
        if end - self.next <= self._sizes.hot:
            return self._next_batches(end)
        return await asyncio.to_thread(self._next_batches, end)

    def _next_batches(self, end: int) -> tuple[Position, bytes]:
        """Whole batches at the next position, and where they end. *Errors*: Corrupt, OffsetExpired."""
        for position, data in self._log.scan(self.next, end, chunk=self._sizes.piece):
            return Position(position + len(data)), data
        raise Corrupt(f"commit log at position {self.next}: expected batches up to {end}", position=self.next)

    async def _send(self, end: Position, data: bytes) -> None:
        start, self.next = self.next, end
        starts = tuple(entry for entry in self._history() if start <= entry.start < end)
        frame, view = Frame(self.header, start, end, starts), memoryview(data)
        await self._connection.send_parts(frame_parts(frame, view[:PIECE_BYTES]))
        for at in range(PIECE_BYTES, len(view), PIECE_BYTES):
            await self._connection.send_parts(more_parts(view[at : at + PIECE_BYTES]))


class LogStreams:
    """The streams of a master, one a standby."""

    def __init__(
        self, commit_log: CommitLog, *, history: Callable[[], History], damaged: Callable[[str], None]
    ) -> None:
        self._log = commit_log
        self._history = history
        self._damaged = damaged
        self._streams: dict[LogId, LogStream] = {}
        self._lingering: dict[LogId, tuple[Hold, asyncio.TimerHandle]] = {}

    def start(self, to: LogId, connection: Connection | None, header: Header, start: Position) -> None:
        """Stream to a standby from ``start`` on, instead of any older stream; without a connection it asks anew."""
        self.stop(to)
        if connection is not None:
            self._streams[to] = LogStream(
                self._log, connection, header, start, history=self._history, damaged=self._damaged
            )
            self._let_go(to)

    def stop(self, to: LogId) -> None:
        """End a stream; what its standby has yet to get is held for a while."""
        stream = self._streams.pop(to, None)
        if stream is not None:
            stream.stop()
            self._let_go(to)
            timer = asyncio.get_running_loop().call_later(LINGER_S, self._let_go, to)
            self._lingering[to] = (stream.hold, timer)

    def stop_all(self) -> None:
        """End all streams, and hold nothing."""
        for to in list(self._streams):
            self.stop(to)
        self.let_go(keeping=frozenset())

    def let_go(self, *, keeping: Collection[LogId]) -> None:
        """Hold the log for nobody but these: there is no room for it any more."""
        for to in [to for to in self._lingering if to not in keeping]:
            self._let_go(to)
        for to, stream in self._streams.items():
            if to not in keeping:
                stream.hold.release()

    def _let_go(self, to: LogId) -> None:
        hold, timer = self._lingering.pop(to, (None, None))
        if hold is not None and timer is not None:
            hold.release()
            timer.cancel()

    def wrote(self) -> None:
        for stream in self._streams.values():
            stream.wrote()

    def heard(self, source: LogId, report: Report) -> None:
        stream = self._streams.get(source)
        if stream is not None and stream.header.handshake == report.header.handshake:
            stream.reported(report.durable)

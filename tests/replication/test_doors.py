"""The doors one by one: connections between replicas, the log on its way, syncs around a cut."""

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from engine_kit import run
from firn_sim.batches import sized
from firn_sim.clock import SimRandomness
from firn_sim.disk import SimDisk

from firn.types import Epoch, Position
from firn_node.filecache import FileCache
from firn_node.log import CommitLog
from firn_node.replication.doors.codec import Arrived, Assembler
from firn_node.replication.doors.connection import Connection
from firn_node.replication.doors.logstream import SIZES, LogStream, LogStreams, Sizes
from firn_node.replication.doors.peers import Peers
from firn_node.replication.doors.syncer import Syncer
from firn_node.replication.messages import Ask, Frame, Handshake, Header, Message, Refusal
from firn_node.replication.record import GroupId, Incarnation, LogId
from firn_node.server import serve
from firn_node.settings import BrokerSettings

GROUP = GroupId("orders-0")


class Replica:
    """Peers at a port, and what they received and lost."""

    def __init__(self, name: str, addresses: dict[str, str]) -> None:
        self.name = LogId(name)
        self.received: list[Message] = []
        self.lost: list[LogId] = []
        self.addresses = addresses
        self.peers = self.new_peers()
        self.server: Any = None

    def new_peers(self) -> Peers:
        return Peers(
            GROUP, self.name, receive=self._receive, lost=self.lost.append, address_of=self.addresses.get,
            randomness=SimRandomness(len(self.name)),
        )  # fmt: skip

    def _receive(self, source: LogId, found: Arrived) -> None:
        assert found.message.header.log_id == source
        self.received.append(found.message)

    async def open(self, port: int = 0) -> None:
        broker: Any = SimpleNamespace(settings=BrokerSettings(data="unused"))
        self.server = await serve(broker, host="127.0.0.1", port=port)
        self.server.context.peers = self.peers
        self.addresses[self.name] = self.server.address

    async def restart(self) -> None:
        port = int(self.server.address.rpartition(":")[2])
        await self.server.stop()
        self.peers = self.new_peers()
        await self.open(port)

    def ask(self, to: "Replica | str", version: int = 1, *, says: str | None = None) -> None:
        name = to if isinstance(to, str) else to.name
        self.peers.send(LogId(name), Ask(Header(GROUP, Epoch(1), LogId(says or self.name)), version))

    def refuse(self, to: "Replica", reason: str = "no") -> None:
        self.peers.send(to.name, Refusal(Header(GROUP, Epoch(1), self.name), reason))


async def until(holds: Callable[[], object]) -> None:
    async with asyncio.timeout(60):
        while not holds():
            await asyncio.sleep(0.005)


@contextlib.asynccontextmanager
async def replicas(*names: str) -> AsyncIterator[list[Replica]]:
    addresses: dict[str, str] = {}
    found = [Replica(name, addresses) for name in names]
    for each in found:
        await each.open()
    try:
        yield found
    finally:
        for each in found:
            await each.peers.close()
            await each.server.stop()


def test_answers_go_back_by_the_connection_of_who_asked_and_need_no_address() -> None:
    async def story() -> None:
        async with replicas("a", "b") as (a, b):
            del b.addresses["a"]
            for version in range(200):
                a.ask(b, version)
            await until(lambda: len(b.received) >= 64)
            b.refuse(a)
            await until(lambda: a.received)
            assert isinstance(a.received[0], Refusal)
            b.ask(a)
            b.refuse(LogOnly("nobody"))
            await asyncio.sleep(0.05)
            assert [m for m in a.received if isinstance(m, Ask)] == []
            assert "no address" in b.peers.status()["dialled"]["a"]

    run(story())


class LogOnly(Replica):
    def __init__(self, name: str) -> None:
        self.name = LogId(name)


def test_what_waits_for_a_peer_that_is_away_is_dropped_and_it_is_dialled_again_when_something_is_said() -> (
    None
):
    async def story() -> None:
        async with replicas("a", "b") as (a, b):
            address = a.addresses.pop("b")
            a.ask(b, 1)
            await until(lambda: "no address" in a.peers.status()["dialled"]["b"])
            a.addresses["b"] = address
            await asyncio.sleep(0.2)
            assert b.received == []
            a.ask(b, 2)
            await until(lambda: b.received)
            assert [m.version for m in b.received if isinstance(m, Ask)] == [2]
            assert a.peers.status()["dialled"]["b"] == "connected"

    run(story())


def test_a_kept_peer_is_dialled_before_there_is_anything_to_say_and_again_when_it_is_back() -> None:
    async def story() -> None:
        async with replicas("a", "b") as (a, b):
            a.peers.keep(frozenset({b.name}))
            await until(lambda: b.peers.status()["accepted"] == ["a"])
            await b.restart()
            await until(lambda: b.peers.status()["accepted"] == ["a"])
            assert a.received == b.received == []

    run(story())


def test_a_peer_that_is_no_longer_kept_is_left_alone_once_its_connection_ends() -> None:
    async def story() -> None:
        async with replicas("a", "b", "c") as (a, b, c):
            a.peers.keep(frozenset({b.name, c.name}))
            await until(lambda: b.peers.status()["accepted"] == c.peers.status()["accepted"] == ["a"])
            a.peers.keep(frozenset({c.name}))
            assert b.peers.status()["accepted"] == ["a"]
            await b.restart()
            await c.restart()
            await until(lambda: c.peers.status()["accepted"] == ["a"])
            assert b.peers.status()["accepted"] == []

    run(story())


def test_a_dial_that_is_meant_for_another_log_is_refused() -> None:
    async def story() -> None:
        async with replicas("a", "b") as (a, b):
            a.addresses["c"] = b.addresses["b"]
            a.ask("c")
            await until(lambda: "the log here is b" in a.peers.status()["dialled"]["c"])
            assert b.received == []
            assert b.peers.status()["accepted"] == []

    run(story())


def test_a_message_in_another_s_name_is_dropped() -> None:
    async def story() -> None:
        async with replicas("a", "b") as (a, b):
            a.ask(b, 1, says="c")
            a.ask(b, 2)
            await until(lambda: b.received)
            assert [m.version for m in b.received if isinstance(m, Ask)] == [2]

    run(story())


def test_a_peer_that_dials_again_ends_its_older_connection() -> None:
    async def story() -> None:
        async with replicas("a", "b") as (a, b):
            a.ask(b, 1)
            await until(lambda: b.received)
            twin = Replica("a", a.addresses)
            twin.ask(b, 2)
            await until(lambda: len(b.received) == 2)
            assert b.lost == ["a"]
            assert b.peers.status()["accepted"] == ["a"]
            b.refuse(a)
            await until(lambda: twin.received)
            assert a.received == []
            await until(lambda: a.peers.status()["dialled"]["b"] != "connected")
            await twin.peers.close()
            await until(lambda: b.lost == ["a", "a"])

    run(story())


def test_messages_that_find_no_room_are_dropped_oldest_first_and_never_wait() -> None:
    async def story() -> None:
        async with replicas("a", "b") as (a, b):
            a.ask(b)
            await until(lambda: b.received)
            sent = 20_000
            for number in range(sent):  # in one turn of the event loop: nothing can leave meanwhile
                b.refuse(a, f"{number} {'x' * 4000}")
            await until(lambda: a.received and reason_of(a.received[-1]) == sent - 1)
            numbers = [reason_of(message) for message in a.received]
            assert numbers == sorted(numbers)
            assert len(numbers) < sent

    run(story())


def reason_of(message: Message) -> int:
    assert isinstance(message, Refusal)
    return int(message.reason.split()[0])


# The log on its way.


class Taker:
    """A connection that takes everything, and remembers the frames."""

    def __init__(self) -> None:
        self.assembler = Assembler()
        self.frames: list[Frame] = []
        self.data = b""

    async def send_parts(self, parts: tuple[Any, ...]) -> None:
        found = self.assembler.feed(b"".join(parts))
        if found is not None:
            assert isinstance(found.message, Frame)
            self.frames.append(found.message)
            self.data += bytes(found.data)


class Counter(Taker):
    """As ``Taker``, of more than one wants to look at."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    async def send_parts(self, parts: tuple[Any, ...]) -> None:
        self.bytes += sum(map(len, parts))


def opened(disk: SimDisk | None = None) -> CommitLog:
    disk = disk or SimDisk(1)
    return CommitLog.open(disk, FileCache(disk, 8), "/d", segment_bytes=1 << 20, verify_from=0)


HEADER = Header(GROUP, Epoch(1), LogId("a"), Handshake(Incarnation("i"), 1))


def streaming(log: CommitLog, taker: Taker, sizes: Sizes = SIZES) -> tuple[LogStream, list[str]]:
    damages: list[str] = []
    connection: Any = taker
    stream = LogStream(
        log, connection, HEADER, Position(0), history=lambda: (), damaged=damages.append, sizes=sizes
    )
    return stream, damages


@pytest.mark.parametrize("hot", [0, 1 << 30], ids=["read in threads", "read at once"])
def test_a_stream_sends_whole_batches_without_gaps_and_follows_the_end(hot: int) -> None:
    async def story() -> None:
        log, taker = opened(), Taker()
        for serial in range(40):
            log.append([sized(300 + 5_000 * serial, serial)])
        stream, _ = streaming(log, taker, Sizes(hot=hot))
        await until(lambda: stream.next == log.written_end)
        log.append([sized(3 << 20, 50), sized(300, 51)])
        stream.wrote()
        await until(lambda: len(taker.data) == log.written_end)
        assert taker.data == log.read(0, log.written_end)
        ends = [frame.end for frame in taker.frames]
        assert [frame.start for frame in taker.frames] == [0, *ends[:-1]]
        starts = {position for position, _ in log.scan(0, log.written_end, chunk=200)} | {log.written_end}
        assert set(ends) <= starts
        stream.stop()

    run(story())


def test_a_stream_stays_within_its_window_of_what_is_reported_durable() -> None:
    window, piece = 100_000, 10_000

    async def story() -> None:
        log, taker = opened(), Taker()
        for serial in range(100):
            log.append([sized(5_000, serial)])
        stream, _ = streaming(log, taker, Sizes(piece, window))
        durable = 0
        while durable < log.written_end:
            for _ in range(20):
                await asyncio.sleep(0)
            if durable + window < log.written_end:
                assert window <= stream.next - durable < window + piece
            durable = min(durable + 37_000, log.written_end)
            stream.reported(Position(durable))
        await until(lambda: len(taker.data) == log.written_end)
        stream.stop()

    run(story())


def test_a_stream_keeps_a_link_of_100_ms_and_a_gigabit_full_while_the_standby_has_not_answered() -> None:
    """As much again is on its way back, or being synced, when the first answer can be here."""
    under_way = 1_000_000_000 // 8 // 10

    async def story() -> None:
        log, taker = opened(), Counter()
        for serial in range(3):
            log.append([sized(9 << 20, serial)])
        assert log.written_end >= 2 * under_way
        stream, _ = streaming(log, taker)
        await until(lambda: taker.bytes >= log.written_end)
        stream.stop()

    run(story())


def test_retention_waits_for_a_stream_until_the_standby_has_synced(tmp_path: Path) -> None:
    async def story() -> None:
        log, taker = opened(), Taker()
        for serial in range(30):
            log.append([sized(300_000, serial)])
        log.sync()
        stream, _ = streaming(log, taker)
        await until(lambda: len(taker.data) == log.written_end)
        assert log.release(log.written_end) == 0
        stream.reported(Position(5_000_000))
        assert 3_000_000 < log.release(log.written_end) <= 5_000_000
        stream.stop()
        assert log.release(log.written_end) <= 5_000_000
        stream.hold.release()
        assert log.release(log.written_end) > 5_000_000

    run(story())


def test_the_log_waits_for_a_standby_that_is_away_until_there_is_no_room_for_it() -> None:
    async def story() -> None:
        log, connection = opened(), cast(Connection, Taker())
        for serial in range(30):
            log.append([sized(300_000, serial)])
        log.sync()
        streams = LogStreams(log, history=lambda: (), damaged=str)
        away, other = LogId("b"), LogId("c")
        for to in (away, other):
            streams.start(to, connection, HEADER, Position(0))
        streams.stop(away)
        assert log.release(log.written_end) == 0
        streams.let_go(keeping={away})
        assert log.release(log.written_end) == 0
        streams.start(away, connection, HEADER, Position(4_499_520))  # it is back, and has more than before
        assert 3_000_000 < log.release(log.written_end) <= 4_499_520
        streams.stop(away)
        streams.let_go(keeping=set())
        assert log.release(log.written_end) > 4_499_520
        streams.stop_all()

    run(story())


def test_a_stream_of_a_damaged_log_says_so() -> None:
    async def story() -> None:
        disk = SimDisk(1)
        log, taker = opened(disk), Taker()
        log.append([sized(5_000, serial) for serial in range(4)])
        disk.flip(f"/d/{0:020d}.log", 4096 + 1)
        _, damages = streaming(log, taker)
        await until(lambda: damages)
        assert "expected" in damages[0]

    run(story())


# Syncs.


def test_a_sync_that_overlaps_a_cut_is_told_again_with_the_new_count() -> None:
    async def story() -> None:
        disk = SimDisk(1)
        log = opened(disk)
        log.append([sized(500, 0)])
        cuts, told = [0], []
        begun, go_on = threading.Event(), threading.Event()

        def delay(kind: str, path: str) -> None:
            if kind == "sync":
                begun.set()
                assert go_on.wait(60)

        disk.delay = delay
        syncer = Syncer(
            log,
            cuts=lambda: cuts[0],
            durable=lambda end, count: told.append((end, count)),
            failed=told.append,
        )
        syncer.request()
        await until(begun.is_set)
        cuts[0] = 1
        go_on.set()
        await until(lambda: len(told) == 2)
        assert told == [(log.written_end, 0), (log.written_end, 1)]
        syncer.request()
        await asyncio.sleep(0.02)
        assert len(told) == 2
        await syncer.stop()

    run(story())


def test_a_sync_from_before_the_log_was_moved_is_not_told() -> None:
    async def story() -> None:
        disk = SimDisk(1)
        log = opened(disk)
        log.append([sized(500, 0)])
        told: list[Any] = []
        begun, go_on = threading.Event(), threading.Event()

        def delay(kind: str, path: str) -> None:
            if kind == "sync":
                begun.set()
                assert go_on.wait(60)

        disk.delay = delay
        syncer = Syncer(log, cuts=lambda: 0, durable=lambda *found: told.append(found), failed=told.append)
        syncer.request()
        await until(begun.is_set)
        log.append([sized(500, 1)])
        syncer.void()
        go_on.set()
        await until(lambda: told)
        assert told == [(log.written_end, 0)]  # by the sync after it alone
        await syncer.stop()

    run(story())


def test_a_failed_sync_is_told_once_and_nothing_after_it() -> None:
    async def story() -> None:
        disk = SimDisk(1)
        log = opened(disk)
        log.append([sized(500, 0)])
        told: list[Any] = []
        disk.fail(1, kinds={"sync"})
        syncer = Syncer(log, cuts=lambda: 0, durable=lambda *_: told.append("durable"), failed=told.append)
        syncer.request()
        await until(lambda: told)
        syncer.request()
        await asyncio.sleep(0.02)
        assert len(told) == 1
        assert told[0].startswith("fsync failed")
        await syncer.stop()

    run(story())

"""Two copies of one partition, compacted when each likes, and readers that hop between them. Fault model:

- both copies hold the same records at the same offsets, as replicas do; what differs is when, how often and how
  thoroughly each compacts, and so what it masks and which tombstones it has let go of (``deleteRetention: 0s``);
- a reader asks a random copy for a page of any size at any moment, through the client's own ``Cursor``;
- nothing is lost or damaged, and the brokers do not restart.

``Rules`` switches one of the reader's two rules off, to show that the checks would see it.
"""

import os
import random
import tempfile
from collections.abc import Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

from engine_kit import NOW, Kit, settings
from hypothesis import strategies as st

from firn.client.cursor import Cursor, PageMeta
from firn.errors import SnapshotExpired
from firn_node.engine.api import ReadRequest, outcomes_or_raise
from firn_node.engine.broker import Broker

KEYS = [b"%d" % i for i in range(12)]
COPIES = 2
# A batch of 16 KiB that loses no row is copied as it is, smaller ones are joined: pages of one record and of many.
LARGE, SMALL, GONE = 17_000, 10, None
COMPACTION = {"deleteRetention": "0s", "segmentBytes": "4Ki", "memory": "64Ki"}

ROW = st.tuples(st.sampled_from(KEYS), st.sampled_from([LARGE, LARGE, SMALL, GONE]))
COPY = st.integers(0, COPIES - 1)
WRITE = st.tuples(st.just("write"), st.lists(ROW, min_size=1, max_size=4))
COMPACT = st.tuples(st.just("compact"), COPY, st.booleans())
START = st.tuples(st.just("start"))
READ = st.tuples(st.just("read"), st.integers(0, 9), COPY, st.sampled_from([1, 1, 4000, 1 << 20]))
HISTORY = st.lists(st.one_of(WRITE, WRITE, WRITE, READ, READ, READ, COMPACT, START), min_size=12, max_size=60)

Operation = tuple[object, ...]


def dense_history(seed: int) -> list[Operation]:
    """A long history, thick with what hurts: few readers that stop and go among many writes and compactions."""
    chance = random.Random(seed)
    tombstones = chance.choice([0, 0.2, 2])  # many of them end most readers early
    history: list[Operation] = []
    for _ in range(chance.randint(30, 60)):
        kind = chance.choices(["write", "read", "compact", "start"], [5, 5, 3, 1])[0]
        match kind:
            case "write":
                sizes = chance.choices([LARGE, SMALL, GONE], [4, 1, tombstones], k=chance.randint(1, 8))
                history.append((kind, [(chance.choice(KEYS), size) for size in sizes]))
            case "read":
                pages = chance.randint(1, 2)
                reader, copy = chance.randrange(3), chance.randrange(COPIES)
                history += [(kind, reader, copy, 1)] * pages
            case "compact":
                history.append((kind, chance.randrange(COPIES), chance.random() < 0.7))
            case _:
                history.append((kind,))
    return history


MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # nothing here needs a disk
Map = dict[bytes, bytes]


class WrongMap(AssertionError):
    """A reader ended with a map that the topic never had."""


@dataclass(frozen=True)
class Rules:
    since: bool = True  # the reader remembers the least horizon seen, and is refused by it
    until_end: bool = (
        True  # the reader stops at max(end at start, every horizon seen), not at the end at start
    )


@dataclass
class World:
    """The copies, and every record ever written: the model."""

    copies: list[Kit]
    records: list[tuple[bytes, bytes | None]] = field(default_factory=list)

    def map(self, end: int | None = None) -> Map:
        """The key-value map of the first ``end`` records."""
        return {k: v for k, v in dict(self.records[:end]).items() if v is not None}

    def states(self, key: bytes, begin: int) -> set[bytes | None]:
        """What ``key`` has been (None: absent) at any time since there were ``begin`` records."""
        return {self.map(begin).get(key), *(v for k, v in self.records[begin:] if k == key)}

    async def write(self, rows: list[tuple[bytes, int | None]]) -> None:
        """Each record as a batch of its own, at the same offset of every copy."""
        base = len(self.records)
        records = [
            (key, None if size is None else (b"%d " % (base + i)).ljust(size, b"."))
            for i, (key, size) in enumerate(rows)
        ]
        for kit in self.copies:
            outcomes = await kit.broker.produce(b"".join(kit.batch("t", [record]) for record in records))
            appended = outcomes_or_raise(outcomes)
            assert [a.base_offset for a in appended] == list(range(base, base + len(rows)))
        self.records.extend(records)


class Hopper:
    """One reader: reads ``until_end``, is checked there, and goes on from there as one that follows."""

    def __init__(self, world: World, rules: Rules) -> None:
        self._world = world
        self._rules = rules
        self._cursor: Cursor | None = None
        self._begin = 0  # records there were at the first request
        self._is_checked = False
        self.map: Map = {}
        self.expired = False

    @property
    def is_at_end(self) -> bool:
        cursor = self._cursor
        return self.expired or (
            cursor is not None and cursor.is_caught_up and cursor.offset == len(self._world.records)
        )

    async def read(self, copy: int, max_bytes: int) -> None:
        """One page from a copy. Errors: WrongMap."""
        if self.expired:
            return
        if self._cursor is None:
            self._begin = len(self._world.records)
            self._cursor = Cursor(0, target=None if self._rules.until_end else self._begin)
        cursor = self._cursor
        request = ReadRequest(
            topic="t", partition=0, offset=cursor.offset, since=cursor.since, max_bytes=max_bytes
        )
        try:
            found = await self._world.copies[copy].broker.read(request)
            meta = PageMeta(
                found.topic_id,
                found.next_offset,
                found.end,
                found.horizon,
                found.tombstone_floor,
                found.generation,
            )
            page = cursor.accept(meta, found.take())
        except SnapshotExpired:
            self._check_reason(cursor)
            self.expired = True
            return
        if not self._rules.since:
            cursor.since = None
        for piece in page.pieces:
            for record in piece.each_record("t"):
                if record.value is None:
                    self.map.pop(record.key, None)
                else:
                    self.map[record.key] = record.value
        if cursor.is_caught_up and not self._is_checked:
            self._is_checked = True
            self._check_end(cursor.offset)

    def _check_reason(self, cursor: Cursor) -> None:
        """A reader is told to start anew only for a tombstone that it has not met."""
        assert cursor.since is not None, "a fresh reader is never refused"
        passed = max(cursor.offset, cursor.since)
        unmet = [key for key, value in self._world.records[passed:] if value is None]
        assert unmet, f"refused at {passed} without a tombstone behind it"

    def _check_end(self, offset: int) -> None:
        """Where ``until_end`` ends the map holds, of every key, what the key has been while the reader read."""
        for key in KEYS:
            held, states = self.map.get(key), self._world.states(key, self._begin)
            if held not in states:
                raise WrongMap(
                    f"until_end, at {offset}: {key!r} is {brief(held)}, was {[brief(s) for s in states]}"
                )
        if self._rules == Rules() and self.map != self._world.map(offset):
            raise WrongMap(f"until_end: not the map of the first {offset} records")

    def check_very_end(self) -> None:
        """Errors: WrongMap unless the map is the topic's, or the reader was told to start anew."""
        expected = self._world.map()
        if not self.expired and self.map != expected:
            wrong = sorted(k for k in {*self.map, *expected} if self.map.get(k) != expected.get(k))
            raise WrongMap(f"at the very end: {wrong!r} differ, the reader began at {self._begin} records")


def brief(value: bytes | None) -> str:
    """A value's number, or ``absent``."""
    return "absent" if value is None else value.split()[0].decode()


@dataclass
class Tally:
    """What a history came to: for checks that the property is not empty."""

    readers: int = 0
    expired: int = 0


async def play(history: list[Operation], rules: Rules = Rules(), tally: Tally | None = None) -> None:
    """Play a history, then let every reader go on to the very end. Errors: WrongMap."""
    async with AsyncExitStack() as stack:
        copies = []
        for _ in range(COPIES):
            folder = stack.enter_context(tempfile.TemporaryDirectory(dir=MEMORY))
            broker = Broker(settings(folder, index="files"))
            await broker.start()
            stack.push_async_callback(broker.stop)
            copies.append(Kit(broker, NOW))
            await copies[-1].create(compaction=COMPACTION)
        world, readers = World(copies), list[Hopper]()
        for operation in history:
            match operation:
                case ("write", list(rows)):
                    await world.write(rows)
                case ("compact", int(copy), bool(force)):
                    await compact(copies[copy], force=force)
                case ("start",):
                    readers.append(Hopper(world, rules))
                case ("read", int(which), int(copy), int(max_bytes)) if readers:
                    await readers[which % len(readers)].read(copy, max_bytes)
        readers += [
            Hopper(world, rules) for _ in range(COPIES)
        ]  # fresh ones, each at one copy: never refused
        for number, (reader, copy) in enumerate(zip(readers, hops(len(readers)), strict=True)):
            await read_to_the_end(reader, copy, hop=number < len(readers) - COPIES)
            reader.check_very_end()
        if tally is not None:
            tally.readers += len(readers)
            tally.expired += sum(r.expired for r in readers)


async def compact(kit: Kit, *, force: bool) -> None:
    run = await kit.compact("t", force=force)
    assert run.partitions[0].state == "done", run.partitions[0].reason


def hops(count: int) -> Iterator[int]:
    return (i % COPIES for i in range(count))


async def read_to_the_end(reader: Hopper, copy: int, *, hop: bool) -> None:
    for _ in range(1000):
        if reader.is_at_end:
            return
        await reader.read(copy, 1)
        copy = (copy + hop) % COPIES
    raise AssertionError("a reader makes no progress")

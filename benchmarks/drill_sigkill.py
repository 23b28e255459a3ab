"""Drill: SIGKILL a broker under load, again and again; nothing acknowledged may be lost, nothing written twice.

Each round: four producers write to a topic of four partitions (1,000 keys, one record in ten a tombstone) through
the client, compactions run now and then, the broker is killed at a random moment and started again on its folder,
sometimes killed once more while it recovers. The producers live on and repeat what was not acknowledged; in some
rounds one is given up instead, so that the outcome of its last records stays unknown. Then it is checked that

- every acknowledged record is in the raw view, at its acknowledged offset, with its key and value;
- per producer and partition the records stand in the order they were sent, none twice, none that was never sent;
- the compacted view's map, and the newest offset of every key, are those recomputed from the raw view, and `get`
  agrees; what a key shows never goes back to an older offset.

After the last round the whole raw view is read again from the start and held against every acknowledgement, and
``firn verify`` audits the stopped folder. A record says who it is: its timestamp is producer * 10^9 + number, which
key and value follow from.

    python benchmarks/drill_sigkill.py --rounds 200 [--seed N] [--data DIR]

Prints the seed first and one JSON line last; the exit code is 1 when anything was wrong, and the folder stays then.
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from array import array
from collections import Counter, deque
from collections.abc import Awaitable
from dataclasses import dataclass, field
from pathlib import Path

from firn.client import Client, Producer, Record
from firn.errors import FirnError, SnapshotExpired
from firn.partitioner import partition_of
from firn_node.demo.process import BrokerProcess
from firn_node.ports import free_ports

TOPIC = "drill"
PARTITIONS = 4
PRODUCERS = 4
KEYS = 1000
NUMBERS = 10**9  # of one producer
LOAD_SECONDS = (0.05, 0.6)
BURST = (1, 150)
BURSTS_UNDER_WAY = 3
GIVE_UP = 0.25  # share of rounds in which a producer is given up with its outcome unknown
KILL_IN_RECOVERY = 0.1
RECOVERY_SECONDS = 1.3  # about as long as a start takes
GETS = 40
SETTLE_SECONDS = 60.0
# Small files and frequent checkpoints: a round crosses every kind of boundary.
BROKER = ("--log-segment-bytes", "1Mi", "--checkpoint-bytes", "512Ki", "--compaction-check", "50ms")
COMPACTION = {"minDirtyRatio": 0.3, "deleteRetention": "0s", "segmentBytes": "64Ki"}
Unacknowledged = deque[tuple[int, Awaitable[tuple[int, int]]]]


def content(id: int) -> tuple[bytes, bytes | None]:
    """Key and value of the record with this id."""
    mixed = id * 0x9E3779B97F4A7C15 >> 7 & 0xFFFFFFFF
    key = b"key-%d" % (mixed % KEYS)
    if mixed // KEYS % 10 == 0:
        return key, None
    size = 16_000 if mixed // KEYS % 200 == 1 else 20 + mixed // KEYS % 180
    return key, (b"%d " % id).ljust(size, b"-")


def longs() -> list["array[int]"]:
    """An empty column of integers for each partition."""
    return [array("q") for _ in range(PARTITIONS)]


@dataclass
class Ledger:
    """What was acknowledged, what the raw view showed, and what is wrong."""

    acknowledged: dict[tuple[int, int], int] = field(
        default_factory=dict
    )  # (partition, offset) -> id, this round
    unknown: set[int] = field(default_factory=set)  # sent and never acknowledged; given up
    kept: list["array[int]"] = field(
        default_factory=lambda: [array("q") for _ in range(PARTITIONS)]
    )  # raw: offset -> id
    certain: list["array[int]"] = field(
        default_factory=lambda: [array("q") for _ in range(PARTITIONS)]
    )  # acknowledged offsets
    last: dict[tuple[int, int], int] = field(default_factory=dict)  # (partition, producer) -> number
    map: dict[bytes, tuple[int, int, bool]] = field(
        default_factory=dict
    )  # key -> partition, offset, is it live
    wrong: Counter[str] = field(default_factory=Counter)
    stories: list[str] = field(default_factory=list)

    def fault(self, kind: str, story: str) -> None:
        self.wrong[kind] += 1
        if len(self.stories) < 20:
            self.stories.append(f"{kind}: {story}")

    def take_raw(self, record: Record) -> None:
        """The next record of the raw view."""
        partition, offset, id = record.partition, record.offset, record.timestamp
        kept = self.kept[partition]
        if offset != len(kept):
            self.fault("lost", f"{partition}: offset {len(kept)} expected in the raw view, found {offset}")
            kept.extend([-1] * (offset - len(kept)))
        key, value = content(id)
        if (record.key, record.value) != (key, value) or partition_of(key, PARTITIONS) != partition:
            self.fault("changed", f"{partition}@{offset}: record {id} is {record!r:.200}")
        producer, number = divmod(id, NUMBERS)
        if number <= self.last.get((partition, producer), -1):
            known = id in kept
            self.fault(
                "duplicated" if known else "out_of_order", f"{partition}@{offset}: {id}, after a later one"
            )
        self.last[partition, producer] = max(number, self.last.get((partition, producer), -1))
        kept.append(id)
        self.map[record.key] = (partition, offset, record.value is not None)

    def close_round(self, before: list[int]) -> int:
        """Hold the acknowledgements of this round against the raw view; how many there were."""
        for (partition, offset), id in self.acknowledged.items():
            kept = self.kept[partition]
            if offset >= len(kept) or kept[offset] != id:
                self.fault("lost", f"{partition}@{offset}: {id} was acknowledged")
            self.certain[partition].append(offset)
        for partition, start in enumerate(before):
            for offset, id in enumerate(self.kept[partition][start:], start):
                if (partition, offset) not in self.acknowledged and id not in self.unknown:
                    self.fault("never_sent", f"{partition}@{offset}: {id}")
        count = len(self.acknowledged)
        self.acknowledged.clear()
        self.unknown.clear()
        return count

    def check_view(self, view: list[Record]) -> None:
        """The compacted view against the raw view's map."""
        newest: dict[bytes, Record] = {}
        ends = [-1] * PARTITIONS
        for record in view:
            if record.offset <= ends[record.partition]:
                self.fault("went_back", f"{record.partition}@{record.offset} behind {ends[record.partition]}")
            ends[record.partition] = record.offset
            if (record.key, record.value) != content(record.timestamp):
                self.fault("changed", f"compacted {record.partition}@{record.offset}: {record!r:.200}")
            newest[record.key] = record
        for key, (partition, offset, is_live) in self.map.items():
            shown = newest.pop(key, None)
            if shown is None:
                if is_live:
                    self.fault("missing", f"{key!r} of {partition}@{offset} is not in the compacted view")
            elif (shown.partition, shown.offset) != (partition, offset):
                self.fault(
                    "went_back", f"{key!r} shows {shown.partition}@{shown.offset}, is {partition}@{offset}"
                )
        for key in newest:
            self.fault("never_sent", f"{key!r} is in the compacted view only")

    def check_get(self, key: bytes, found: Record | None) -> None:
        partition, offset, is_live = self.map.get(key, (0, -1, False))
        shown = (found.partition, found.offset) if found is not None else None
        if shown != ((partition, offset) if is_live else None):
            self.fault("get", f"{key!r} shows {shown}, is {partition}@{offset}, live: {is_live}")


class Writer:
    """One producer under load, with a number for every record."""

    def __init__(self, client: Client, number: int, ledger: Ledger, chance: random.Random) -> None:
        self._client = client
        self._ledger = ledger
        self._chance = chance
        self._next = number * NUMBERS
        self._is_given_up = False
        self._producer = self._fresh()

    def _fresh(self) -> Producer:
        return self._client.producer(TOPIC, linger_ms=1, batch_bytes=16 << 10)

    async def load(self, stop: asyncio.Event) -> None:
        """Send until told to stop; returns when all is acknowledged, or the producer was given up."""
        bursts: deque[Unacknowledged] = deque()
        try:
            while not stop.is_set():
                burst: Unacknowledged = deque()
                for _ in range(self._chance.randint(*BURST)):
                    id, self._next = self._next, self._next + 1
                    self._ledger.unknown.add(id)
                    key, value = content(id)
                    burst.append((id, self._producer.send(key, value, timestamp=id)))
                bursts.append(burst)
                if len(bursts) >= BURSTS_UNDER_WAY:
                    await self._take(bursts.popleft())
                await asyncio.sleep(self._chance.random() * 0.01)
            while bursts:
                await self._take(bursts.popleft())
        except FirnError as error:
            if not self._is_given_up:
                self._ledger.fault("refused", f"producer {self._next // NUMBERS}: {error!r}")
            self._is_given_up = False
            self._producer = self._fresh()

    async def _take(self, burst: Unacknowledged) -> None:
        while burst:
            id, sent = burst[0]
            partition, offset = await sent
            burst.popleft()
            self._ledger.acknowledged[partition, offset] = id
            self._ledger.unknown.discard(id)

    async def give_up(self) -> None:
        self._is_given_up = True
        await self._producer.abort()


@dataclass
class Drill:
    data: Path
    seed: int
    chance: random.Random
    ledger: Ledger = field(default_factory=Ledger)
    acknowledged: int = 0
    kills: int = 0
    recoveries: list[float] = field(default_factory=list)
    rounds: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        [port] = free_ports("127.0.0.1", 1)  # producers live on over a restart: the address must stay
        self.address = f"127.0.0.1:{port}"
        self.broker = BrokerProcess(self.data, "--listen", self.address, *BROKER)

    async def run(self, rounds: int) -> None:
        await asyncio.to_thread(self.broker.start)
        async with contextlib.AsyncExitStack() as stack:
            stack.callback(self.broker.kill)
            self.client = await stack.enter_async_context(Client(self.address))
            await self.client.create_topic(TOPIC, partitions=PARTITIONS, compaction=COMPACTION)
            writers = []
            for number in range(PRODUCERS):
                client = await stack.enter_async_context(Client(self.address))
                writers.append(Writer(client, number, self.ledger, random.Random(self.chance.random())))
            for number in range(rounds):
                began = time.perf_counter()
                await asyncio.wait_for(self._round(writers), SETTLE_SECONDS)
                self.rounds.append(time.perf_counter() - began)
                if self.ledger.wrong:
                    self.ledger.stories.append(f"in round {number}")
                    return
                if number % 20 == 19:
                    print(f"{number + 1} rounds, {self.acknowledged} records acknowledged", flush=True)
            await self._last()

    async def _round(self, writers: list[Writer]) -> None:
        before = [len(kept) for kept in self.ledger.kept]
        stop = asyncio.Event()
        loads = [asyncio.create_task(writer.load(stop)) for writer in writers]
        compactions = asyncio.create_task(self._compact())
        await asyncio.sleep(self.chance.uniform(*LOAD_SECONDS))
        self.broker.kill()
        self.kills += 1
        stop.set()
        compactions.cancel()
        if self.chance.random() < GIVE_UP:
            await self.chance.choice(writers).give_up()
        await self._restart()
        await asyncio.gather(*loads)
        await self._check(before)

    async def _compact(self) -> None:
        """Ask for compactions at random moments."""
        with contextlib.suppress(FirnError):  # the broker is killed meanwhile
            while True:
                await asyncio.sleep(self.chance.random() * 0.4)
                await self.client.compact(TOPIC, force=self.chance.random() < 0.7)

    async def _restart(self) -> None:
        while self.chance.random() < KILL_IN_RECOVERY:
            timer = threading.Timer(self.chance.random() * RECOVERY_SECONDS, self._kill_now)
            timer.start()
            with contextlib.suppress(RuntimeError):  # it did not get ready
                await asyncio.to_thread(self.broker.start)
            timer.join()
            self.broker.kill()
            self.kills += 1
        self.recoveries.append(await asyncio.to_thread(self.broker.start))

    def _kill_now(self) -> None:
        os.kill(self.broker.pid, signal.SIGKILL)

    async def _check(self, before: list[int]) -> None:
        ledger = self.ledger
        start = dict(enumerate(before))
        async for page in self.client.reader(TOPIC, view="raw", start=start, until_end=True).pages():
            for record in page:
                ledger.take_raw(record)
        self.acknowledged += ledger.close_round(before)
        ledger.check_view(await self._view())
        keys = [b"key-%d" % self.chance.randrange(KEYS) for _ in range(GETS)]
        for key, found in zip(keys, await self.client.get_many(TOPIC, keys), strict=True):
            ledger.check_get(key, found)

    async def _view(self) -> list[Record]:
        """The compacted view. Tombstones go at once here: a reader whom a compaction overtakes is told to start anew."""
        while True:
            try:
                return [record async for record in self.client.reader(TOPIC, until_end=True)]
            except SnapshotExpired:
                continue

    async def _last(self) -> None:
        """The whole raw view once more, against all that was ever acknowledged; then the offline audit."""
        seen = longs()
        async for page in self.client.reader(TOPIC, view="raw", until_end=True).pages():
            for record in page:
                if record.offset != len(seen[record.partition]):
                    self.ledger.fault("lost", f"{record.partition}@{len(seen[record.partition])} at the end")
                seen[record.partition].append(record.timestamp)
        for partition, (now, then) in enumerate(zip(seen, self.ledger.kept, strict=True)):
            if now != then:
                self.ledger.fault("changed", f"the raw view of partition {partition} is not what it was")
            for offset in self.ledger.certain[partition]:
                if offset >= len(now):
                    self.ledger.fault("lost", f"{partition}@{offset} was acknowledged once")
        if self.broker.stop() != 0:
            self.ledger.fault("stop", "the broker did not stop cleanly")
        audit = [sys.executable, "-m", "firn_node", "verify", "--data", str(self.data)]
        done = await asyncio.to_thread(subprocess.run, audit, capture_output=True, text=True)
        if done.returncode != 0:
            self.ledger.fault("audit", f"firn verify: {done.stdout}{done.stderr}")

    def report(self) -> dict[str, object]:
        wrong = self.ledger.wrong
        return {
            "seed": self.seed, "rounds": len(self.rounds), "kills": self.kills, "acknowledged": self.acknowledged,
            "lost": wrong["lost"], "duplicated": wrong["duplicated"],
            "other_faults": {k: n for k, n in wrong.items() if k not in ("lost", "duplicated")},
            "stories": self.ledger.stories,
            "recovery_seconds": {
                "median": round(statistics.median(self.recoveries or [0]), 3),
                "max": round(max(self.recoveries, default=0), 3),
            },
            "round_seconds": {
                "median": round(statistics.median(self.rounds or [0]), 3),
                "max": round(max(self.rounds, default=0), 3),
            },
        }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32))
    parser.add_argument("--data", type=Path, help="an empty folder, kept; default: a temporary one")
    chosen = parser.parse_args()
    print(f"seed {chosen.seed}", flush=True)
    data = chosen.data or Path(tempfile.mkdtemp(prefix="firn-drill-"))
    drill = Drill(data, chosen.seed, random.Random(chosen.seed))
    is_done = False
    try:
        asyncio.run(drill.run(chosen.rounds))
        is_done = not drill.ledger.wrong
    finally:
        print(json.dumps(drill.report()))
        if chosen.data is None and is_done:
            shutil.rmtree(data)
        elif not is_done:
            print(f"the folder is kept: {data}", file=sys.stderr)
    return 0 if is_done else 1


if __name__ == "__main__":
    sys.exit(main())

"""The load of a drill: producers, consumers and clients of single keys, every operation written down.

8 producers write bursts through pipelined producers: 1,000 keys by a Zipf law, one record in ten a tombstone. 4
consumers, two of each view, follow the topic's end; one of each reads from any replica. 4 clients put, get, delete and
compare-and-set 64 hot keys, one operation at a time, which is what is checked for linearizability.

Rates are low: what is looked for are wrong answers, not a full machine.
"""

import asyncio
import bisect
import itertools
import random
from dataclasses import dataclass, field

from firn.client import Client, Producer
from firn.errors import Conflict, FirnError, OffsetExpired, SnapshotExpired
from firn_node.drills.history import SESSION, History, Pass, row_of
from firn_node.drills.linear import NONE, Operation

TOPIC = "drill"
PARTITIONS = 4
PRODUCERS, CONSUMERS, HOT_CLIENTS = 8, 4, 4
KEYS, HOT_KEYS = 1000, 64
ZIPF = 1.1
BURST = (1, 12)
PAUSE_S = (0.02, 0.12)
HOT_PAUSE_S = (0.005, 0.03)
TOMBSTONES = 0.1
DELIVERY_S = 60.0  # longer than any outage of a drill: few outcomes stay unknown
PUT_S = 15.0
GIVE_UP = 0.01  # share of bursts after which a producer is given up, its outcomes unknown
_REST_S = 0.2  # before a consumer that failed goes on
COMPACTION = {"minDirtyRatio": 0.3, "deleteRetention": "1h", "segmentBytes": "64Ki"}


@dataclass(slots=True)
class Counts:
    """What the load came to; ``errors``: how often, by class; ``failed_writes``: that a client gave up."""

    errors: dict[str, int] = field(default_factory=dict)
    failed_writes: int = 0
    acknowledged_at: list[float] = field(default_factory=list)

    def note(self, error: BaseException) -> None:
        name = type(error).__name__
        self.errors[name] = self.errors.get(name, 0) + 1

    def note_write(self, error: BaseException) -> None:
        self.failed_writes += 1
        self.note(error)


class Load:
    """Load on the brokers at ``addresses``. ``start`` it, ``stop`` writing, then ``finish`` reading."""

    def __init__(self, addresses: str, chance: random.Random) -> None:
        self.history = History()
        self.counts = Counts()
        self._addresses = addresses
        self._chance = chance
        self._sessions = itertools.count(1)
        self._zipf = list(itertools.accumulate(1 / rank**ZIPF for rank in range(1, KEYS + 1)))
        self._known: dict[bytes, int] = {}  # of hot keys: an offset that somebody was told
        self._writing: list[asyncio.Task[None]] = []
        self._reading: list[asyncio.Task[None]] = []
        self._stopping = asyncio.Event()
        self._ends: dict[int, int] | None = None  # where readers stop

    @staticmethod
    async def create_topic(addresses: str, *, min_in_sync: int) -> None:
        async with Client(addresses, timeout=60) as client:
            await client.create_topic(
                TOPIC, partitions=PARTITIONS, compaction=COMPACTION, durability={"minInSync": min_in_sync}
            )

    def start(self) -> None:
        writers = [self._produce(self._fork()) for _ in range(PRODUCERS)]
        writers += [self._use_hot_keys(self._fork()) for _ in range(HOT_CLIENTS)]
        self._writing = [asyncio.create_task(each) for each in writers]
        views = [("raw", "compacted")[number % 2] for number in range(CONSUMERS)]
        self._reading = [asyncio.create_task(self._consume(n, view)) for n, view in enumerate(views)]

    def _fork(self) -> random.Random:
        return random.Random(self._chance.random())

    async def stop(self) -> None:
        """Send nothing more; returns when every outcome is known, or is known to stay unknown."""
        self._stopping.set()
        await asyncio.gather(*self._writing)

    async def finish(self, ends: dict[int, int], seconds: float) -> list[str]:
        """Let the consumers come to these ends; who did not within ``seconds``."""
        self._ends = ends
        done, late = await asyncio.wait(self._reading, timeout=seconds)
        for task in late:
            task.cancel()
        await asyncio.gather(*late, return_exceptions=True)
        for task in done:
            task.result()
        return [f"consumer {n} did not come to the end" for n, t in enumerate(self._reading) if t in late]

    async def abort(self) -> None:
        """End everything at once."""
        tasks = [*self._writing, *self._reading]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def gap(self, since: float, until: float) -> float:
        """The longest time within ``[since, until]`` without an acknowledgement."""
        times = [since, *(at for at in sorted(self.counts.acknowledged_at) if since < at < until), until]
        return max(b - a for a, b in itertools.pairwise(times))

    # Producers.

    def _begin(self, session: int, number: int, key: bytes, *, is_delete: bool, size: int) -> int:
        """Write down that a record is sent; its id."""
        id = session * SESSION + number
        self.history.sent[id] = (key, None if is_delete else (b"%d " % id).ljust(size, b"-"))
        return id

    def _acknowledged(self, id: int, place: tuple[int, int]) -> None:
        self.history.acknowledged[id] = (int(place[0]), int(place[1]))
        self.counts.acknowledged_at.append(asyncio.get_running_loop().time())

    async def _produce(self, chance: random.Random) -> None:
        async with Client(self._addresses, timeout=DELIVERY_S) as client:
            while not self._stopping.is_set():
                producer = client.producer(
                    TOPIC, linger_ms=1, batch_bytes=16 << 10, delivery_timeout=DELIVERY_S
                )
                try:
                    await self._produce_session(producer, next(self._sessions), chance)
                except FirnError as error:
                    self.counts.note_write(error)
                finally:
                    await producer.abort()

    async def _produce_session(self, producer: Producer, session: int, chance: random.Random) -> None:
        """Bursts until the end, or until this producer is given up."""
        number = 0
        while not self._stopping.is_set():
            burst = []
            for _ in range(chance.randint(*BURST)):
                key = b"key-%d" % bisect.bisect(self._zipf, chance.random() * self._zipf[-1])
                is_delete = chance.random() < TOMBSTONES
                id = self._begin(session, number, key, is_delete=is_delete, size=chance.randint(20, 400))
                burst.append((id, producer.send(*self.history.sent[id], timestamp=id)))
                number += 1
            if chance.random() < GIVE_UP:
                await asyncio.sleep(chance.random() * 0.005)
                return
            for id, sent in burst:
                self._acknowledged(id, await sent)
            await asyncio.sleep(chance.uniform(*PAUSE_S))

    # Single keys.

    async def _use_hot_keys(self, chance: random.Random) -> None:
        session = next(self._sessions)
        self.history.unordered.add(session)
        async with Client(self._addresses, timeout=PUT_S) as client:
            for number in itertools.count():
                if self._stopping.is_set():
                    return
                key = b"hot-%d" % chance.randrange(HOT_KEYS)
                if chance.random() < 0.45:
                    await self._get(client, key)
                else:
                    await self._put(client, session, number, key, chance)
                await asyncio.sleep(chance.uniform(*HOT_PAUSE_S))

    async def _get(self, client: Client, key: bytes) -> None:
        now = asyncio.get_running_loop().time
        began = now()
        try:
            found = await client.get(TOPIC, key)
        except FirnError as error:
            self.counts.note(error)
            return
        write, offset = (None, None) if found is None else (found.timestamp, found.offset)
        self.history.operations.append(
            Operation(
                key=key, kind="get", began=began, ended=now(), outcome="done", write=write, offset=offset
            )
        )
        if offset is not None:
            self._known[key] = offset

    async def _put(
        self, client: Client, session: int, number: int, key: bytes, chance: random.Random
    ) -> None:
        now = asyncio.get_running_loop().time
        is_delete = chance.random() < 2 * TOMBSTONES
        if_offset = self._known.get(key, NONE) if chance.random() < 0.4 else None
        id = self._begin(session, number, key, is_delete=is_delete, size=40)
        asked = {"key": key, "kind": "put", "began": now(), "write": id, "is_delete": is_delete}
        told: dict[str, object] = {}
        try:
            place = await client.put(TOPIC, *self.history.sent[id], if_offset=if_offset, timestamp=id)
        except Conflict as refusal:
            newest = int(refusal.details["newest_offset"])
            self.history.refused.add(id)
            told = {"ended": now(), "outcome": "conflict", "newest": newest}
            self._known[key] = newest
        except FirnError as error:
            self.counts.note_write(error)
        else:
            self._acknowledged(id, place)
            told = {"ended": now(), "outcome": "done", "offset": int(place[1])}
            self._known[key] = int(place[1])
        self.history.operations.append(Operation(**asked, if_offset=if_offset, **told))  # type: ignore[arg-type]

    # Consumers.

    async def _consume(self, number: int, view: str) -> None:
        """Follow the end until it is known and reached; go on after every error where the last page ended."""
        seen = Pass(f"consumer {number} ({view})", view)
        self.history.passes.append(seen)
        position: dict[int, int] = {}
        read_from = "any" if number >= CONSUMERS // 2 else "master"
        async with Client(self._addresses, timeout=10, read_from=read_from) as client:
            while not self._is_at_end(position):
                try:
                    await self._read_on(client, seen, position)
                except (OffsetExpired, SnapshotExpired) as error:
                    self.counts.note(error)
                    seen, position = Pass(seen.name, view), {}
                    self.history.passes.append(seen)
                except FirnError as error:
                    self.counts.note(error)
                    await asyncio.sleep(_REST_S)
        seen.is_whole = True

    def _is_at_end(self, position: dict[int, int]) -> bool:
        return self._ends is not None and all(position.get(p, 0) >= end for p, end in self._ends.items())

    async def _read_on(self, client: Client, seen: Pass, position: dict[int, int]) -> None:
        start = {p: position.get(p, 0) for p in range(PARTITIONS)}
        reader = client.reader(TOPIC, view=seen.view, start=start)
        try:
            pages = reader.pages()
            while not self._is_at_end(position):
                try:
                    async with asyncio.timeout(1.0):
                        page = await anext(pages)
                except TimeoutError:
                    return  # begin anew: the end may be known by now
                for record in page:
                    seen.rows.append(row_of(record))
                    position[record.partition] = record.offset + 1
        finally:
            await reader.close()

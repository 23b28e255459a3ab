"""A simulated rebuild: three replicas, one of which starts anew while the others write, compact and let go of their log.

One seed, one run. It drives the broker's own rebuild, on both sides, with its two threads, above ``SimDisk`` and on
simulated time. The names are those of the design's model.

The fault model, at every request of the pull and every step that it takes on its disk: the master writes (puts,
tombstones, both of one key), compacts, by force or what is sealed, makes a checkpoint and lets go of its log, breaks its
pins, is restarted; another replica becomes master; the connection ends, in the middle of a segment too; the standby
is restarted, compacts what it has, or is told to start anew again. A restart is clean, a killed process, or a power
loss that tears what was not synced. Before that the standby was away for a while, so that its old rows are old.

Invariants, of every replica that serves, whenever it has all that the master has:

- ``SameView``: each key has the value that was written last, and no key that was deleted has one;
- ``NoOffsetTwice``: the next offset of each partition is the number of records ever written to it.

``SameView`` of the master is the model's ``MasterView``. At the end the faults stop, and the standby must be whole
within ``LIVE_S``.

Not in it: the group (elections, what is committed: ``firn_sim.group`` has those; here all that the master wrote is
committed, and its successor has all of it), HTTP, producers, light queues, a full disk.
"""

import asyncio
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

from firn_sim.checkers import Violated, telling
from firn_sim.rebuild.node import Cluster, Node, Unchecked
from firn_sim.rebuild.remote import Faults, SimRemote, given_up
from firn_sim.turns import Died, SimLoop, current_turn

from firn.batch import Identity, columns_of, encode
from firn.errors import FirnError
from firn.topicspec import TopicSpec, parse_spec
from firn.types import TOPICS_TOPIC, TOPICS_TOPIC_ID
from firn_node import failpoints
from firn_node.engine.api import TopicInfo
from firn_node.engine.catalogue import topic_value
from firn_node.engine.topicids import topic_id_at
from firn_node.log.commitlog import Hold
from firn_node.rebuild.standby import Rebuilding

LIVE_S = 90.0
TOPIC = "t"
PARTITIONS = 2
KEYS = [b"key-%02d" % number for number in range(12)]
SPEC = {
    "partitions": PARTITIONS,
    "retention": {"time": "0s", "size": 0},
    "compaction": {"deleteRetention": "0s", "segmentBytes": "4Ki"},
}
CHECKED_SHARE = 0.1  # a look at all keys takes as long as ten writes
STOPS = ("clean", "kill", "power")


class NotLive(AssertionError):
    """The faults have stopped, and the standby does not become whole."""


@dataclass(frozen=True, slots=True)
class Shape:
    """How many steps a run has of each part, and how much of what happens in them (the weights)."""

    calm: tuple[int, int] = (6, 14)
    away: tuple[int, int] = (0, 12)
    strikes: tuple[int, int] = (20, 60)
    value_bytes: tuple[int, ...] = (60, 400, 900)
    min_dead_ratio: tuple[float, ...] = (0.25, 1.0)  # 1.0: rows are masked, hardly a segment is written anew
    stray: float = 0.2  # share of writes to another partition than the busy one
    request_s: tuple[float, float] = (0.005, 0.25)  # of the pull
    by_force: tuple[float, ...] = (0.2, 0.7)  # share of compactions
    while_calm: Mapping[str, float] = field(
        default_factory=lambda: {"write": 6, "compact": 1, "compact_all": 2, "let_go": 1}
    )
    while_away: Mapping[str, float] = field(default_factory=lambda: {"write": 2, "compact": 1, "let_go": 1})
    while_pulling: Mapping[str, float] = field(
        default_factory=lambda: {
            "write": 8, "compact": 8, "let_go": 5, "break_pins": 2, "restart_master": 0.7, "restart_standby": 1,
            "change_master": 0.7, "compact_standby": 1, "start_anew": 0.15,
        }
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Clauses:
    """Of section 4 of the design, all in force. ``dial``: what the standby asks its master by."""

    dial: Callable[..., SimRemote] = SimRemote
    streams_first: bool = True
    checks_gaps: bool = True  # step 6 of the rebuild


@dataclass(slots=True)
class RebuildCounts:
    """What a run has reached, so that a tame one is noticed."""

    records: int = 0
    rebuilds: int = 0
    compactions: int = 0
    dropped_tombstones: int = 0
    released: int = 0
    broken_pins: int = 0
    restarts: int = 0
    masters: int = 0
    starts_anew: int = 0
    checks: int = 0


class RebuildGroup:
    def __init__(self, seed: int, clauses: Clauses = Clauses(), shape: Shape = Shape()) -> None:
        self.seed = seed
        self.counts = RebuildCounts()
        self.story: list[str] = []
        self._clauses = clauses
        self._shape = shape
        self._rng = rng = random.Random(seed)
        self._loop = SimLoop()
        self._cluster = Cluster(self._loop, rng, rng.choice(shape.min_dead_ratio))
        self._by_force = rng.choice(shape.by_force)
        self._busy = 0  # the partition that most is written to
        self._faults = Faults(shape.request_s)
        self._crash_share = 0.0
        self._size = rng.choice(shape.value_bytes)
        self._rows: dict[tuple[str, int], list[tuple[bytes, bytes | None]]] = {}
        self._checked: dict[str, str] = {}  # the log_id of each node when it was looked at last
        self._holds: dict[str, tuple[Node, int, Hold]] = {}
        dial = partial(clauses.dial, self._cluster, self._faults)
        self._cluster.nodes = [
            Node(ordinal, self._cluster, dial, Rebuilding if clauses.checks_gaps else Unchecked)
            for ordinal in range(3)
        ]
        self._cluster.master = self._cluster.nodes[0]
        self._standby = self._cluster.nodes[2]

    @property
    def now(self) -> float:
        return self._loop.time()

    def run(self) -> RebuildCounts:
        """The whole run. *Errors*: Violated, NotLive, and whatever the code under test raises."""
        failpoints.hook = self._stepped
        try:
            self._loop.run_until_complete(self._run())
        finally:
            failpoints.hook = None
            self._loop.run_until_complete(self._end())
            self._loop.close()
        return self.counts

    def tell(self, what: str) -> None:
        self.story.append(f"{self.now:8.3f} {what}")

    # The story.

    async def _run(self) -> None:
        nodes = self._cluster.nodes
        nodes[0].is_rebuilt = True
        for node in nodes:
            node.start()
        self._create()
        await self._steps(self._shape.calm, self._shape.while_calm)
        await self._fall_behind()
        self._faults.broken = self._rng.choice((0.0, 0.02, 0.1))
        self._crash_share = self._rng.choice((0.0, 0.0, 0.03))
        await self._steps(self._shape.strikes, self._shape.while_pulling)
        self._faults.broken = self._crash_share = 0.0
        await self._settle()

    async def _end(self) -> None:
        for node in self._cluster.nodes:
            await node.stop("kill")

    async def _steps(
        self, count: tuple[int, int], weights: Mapping[str, float], but: Node | None = None
    ) -> None:
        """So many things that happen, one after the other; ``but``: the node that is away."""
        happens: dict[str, Callable[[], object]] = {
            "write": self._write, "compact": self._compact, "compact_all": self._compact_all,
            "let_go": self._let_go, "break_pins": self._break_pins, "restart_master": self._restart_master,
            "restart_standby": self._restart_standby, "change_master": self._change_master,
            "compact_standby": self._compact_standby, "start_anew": self._start_anew,
        }  # fmt: skip
        for _ in range(self._rng.randint(*count)):
            await self._pass_time(but)
            [name] = self._rng.choices(list(weights), list(weights.values()))
            found = happens[name]()
            if asyncio.iscoroutine(found):
                await found
            self._check_nodes()

    async def _pass_time(self, but: Node | None = None) -> None:
        await asyncio.sleep(self._rng.uniform(0.01, 0.15))
        await self._look_after(but)
        self._stream()

    async def _fall_behind(self) -> None:
        """The standby is away for a while; then it starts anew."""
        standby = self._standby
        await standby.stop(self._rng.choice(STOPS))
        await self._steps(self._shape.away, self._shape.while_away, but=standby)
        standby.start()
        if standby.is_rebuilt:
            self._anew(standby, "it was away")

    def _anew(self, node: Node, reason: str) -> None:
        self.tell(f"{node.name} starts anew: {reason}")
        self.counts.starts_anew += 1
        if node.is_rebuilt:
            node.given_up = given_up(node)
        node.had.clear()
        node.start_anew(reason)

    async def _look_after(self, but: Node | None) -> None:
        """A process that has ended is started again, but for the one that is away."""
        for node in self._cluster.nodes:
            if node is but:
                continue
            if node.is_up and node.has_failed:
                self.tell(f"{node.name} ended: {node.core.health.failed}")
                await node.restart(self._rng.choice(STOPS))
            elif not node.is_up:
                node.start()
            if node.is_whole:
                node.dispatch()

    # The stream.

    def _stream(self) -> None:
        master = self._cluster.master
        if not master.is_whole:
            return
        for node in self._cluster.nodes:
            if node is not master and node.is_up and not node.has_failed:
                self._stream_to(master, node)

    def _stream_to(self, master: Node, node: Node) -> None:
        """Bytes of the master's log, which keeps them until they are durable at the standby."""
        source, log = master.core.log, node.core.log
        is_early = self._clauses.streams_first or node.is_rebuilt or node.rebuilding.installed.is_set()
        is_empty = log.written_end == log.start
        if log.written_end < source.start:
            if not is_empty or (node.is_rebuilt or (node.has_begun and self._clauses.streams_first)):
                self._anew(node, "its place in the stream is gone")
                return
            self._begin(node, source.start, is_late=node.has_begun)
        elif is_empty and not node.has_begun:
            node.has_begun = True
        if not is_early:
            return
        self._hold(master, node)
        for position, data in source.scan(log.written_end, source.written_end, chunk=2048):
            node.copy(position, data)
        node.dispatch()
        self._hold(master, node)

    def _begin(self, node: Node, start: int, *, is_late: bool) -> None:
        if not is_late:
            node.begin(start)
        elif node.rebuilding.installed.is_set():
            node.core.log.begin_at(start)
            node.core.dispatched_position = start

    def _hold(self, master: Node, node: Node) -> None:
        """Held back from retention; as long as this process of the master lives, also while nobody follows."""
        known = self._holds.get(node.name)
        position = node.core.log.durable_end
        if known is not None and known[:2] == (master, master.life):
            hold = known[2]
            hold.move(position)
            if hold.position <= position:
                return
            hold.release()
        self._holds[node.name] = (master, master.life, master.core.log.hold(position))

    # What happens.

    def _create(self) -> None:
        """The topic, by a record of ``__topics``."""
        spec, master = parse_spec(SPEC), self._cluster.master
        self._rows[TOPICS_TOPIC, 0] = []
        size = len(self._batch(TOPICS_TOPIC_ID, 0, [(TOPIC.encode(), self._value(0, spec))]))
        topic_id = topic_id_at(master.core.log.plan([size])[0], 0)
        self._append(TOPICS_TOPIC, 0, [(TOPIC.encode(), self._value(topic_id, spec))])
        for number in range(PARTITIONS):
            self._rows[TOPIC, number] = []

    def _value(self, topic_id: int, spec: TopicSpec) -> bytes:
        return topic_value(TopicInfo(TOPIC, topic_id, spec))

    def _batch(
        self, topic_id: int, number: int, rows: list[tuple[bytes, bytes | None]], base: int = 0
    ) -> bytes:
        now = self._cluster.master.core.clock.now_ms()
        columns = columns_of([key for key, _ in rows], [value for _, value in rows], now, base_offset=base)
        identity = Identity(
            topic_id=topic_id, partition=number, epoch=self._cluster.epoch, append_timestamp=now
        )
        return encode(columns, identity)

    def _write(self) -> None:
        master, rng = self._cluster.master, self._rng
        if not master.is_whole:
            return
        if rng.random() < 0.15:
            self._busy = rng.randrange(PARTITIONS)
        for _ in range(rng.randint(1, 4)):
            number = self._busy if rng.random() < 1 - self._shape.stray else rng.randrange(PARTITIONS)
            base = len(self._rows[TOPIC, number])
            keys = rng.choices(KEYS, k=rng.choice((1, 1, 2, 3)))
            self._append(
                TOPIC, number,
                [
                    (key, None if rng.random() < 0.45 else b"%d " % (base + i) * (self._size // 4))
                    for i, key in enumerate(keys)
                ],
            )  # fmt: skip

    def _append(self, name: str, number: int, rows: list[tuple[bytes, bytes | None]]) -> None:
        master, known = self._cluster.master, self._rows[name, number]
        partition = master.partitions.get(master.core.catalogue.by_name[name], number)
        if partition.next_offset != len(known):
            self._fail("NoOffsetTwice", f"{master.name} gives {partition.next_offset} in {name}/{number}, "
                       f"{len(known)} were given")  # fmt: skip
        master.partitions.active(partition)
        master.append(self._batch(partition.topic.topic_id, number, rows, len(known)))
        known += rows
        self.counts.records += len(rows)

    async def _compact(self) -> None:
        master = self._cluster.master
        if master.is_whole:
            before = self._tombstones(master)
            await master.compact(
                self._rng.choice((TOPIC, TOPIC, TOPICS_TOPIC)), force=self._rng.random() < self._by_force
            )
            self.counts.compactions += 1
            self.counts.dropped_tombstones += self._tombstones(master) < before

    def _tombstones(self, node: Node) -> int:
        return sum(s.tombstones for p in node.partitions for s in p.log.manifest.segments)

    async def _compact_all(self) -> None:
        self._stream()
        for node in self._cluster.nodes:
            if node.is_whole:
                for name in (TOPIC, TOPICS_TOPIC):
                    await node.compact(name, force=True)

    async def _compact_standby(self) -> None:
        if self._standby.is_up and not self._standby.rebuilding.holds_dispatch:
            await self._standby.compact(TOPIC, force=self._rng.random() < 0.5)

    async def _let_go(self) -> None:
        for node in self._cluster.nodes:
            if node.is_whole and self._rng.random() < 0.8:
                before = node.core.log.start
                await node.let_go()
                self.counts.released += node.core.log.start > before

    def _break_pins(self) -> None:
        if self._cluster.master.is_up:
            self._cluster.master.source.take_all_back()
            self.counts.broken_pins += 1

    async def _restart_master(self) -> None:
        await self._restart(self._cluster.master)

    async def _restart_standby(self) -> None:
        await self._restart(self._standby)

    async def _restart(self, node: Node) -> None:
        how = self._rng.choice(STOPS)
        self.tell(f"{node.name} restarts: {how}")
        self.counts.restarts += 1
        await node.stop(how)
        await asyncio.sleep(self._rng.uniform(0.0, 0.5))
        node.start()
        if node.is_whole:
            node.dispatch()

    def _change_master(self) -> None:
        """To a replica that has everything."""
        self._stream()
        others = [
            node for node in self._cluster.nodes if node is not self._cluster.master and self._has_all(node)
        ]
        if others:
            self._cluster.master = self._rng.choice(others)
            self._cluster.epoch += 1
            self.counts.masters += 1
            self.tell(f"{self._cluster.master.name} is master")

    def _start_anew(self) -> None:
        node = self._standby
        if node.is_up and not node.has_failed and node is not self._cluster.master:
            self._anew(node, "it was told to")

    def _stepped(self, name: str) -> None:
        """A step of a rebuild on its disk."""
        if not name.startswith("rebuild."):
            return
        if self._rng.random() < self._crash_share:
            raise Died(name)
        turn = current_turn()
        if turn is not None:
            turn.pause(self._rng.uniform(0.0, 0.1))

    # The end.

    async def _settle(self) -> None:
        limit = self.now + LIVE_S
        while not all(self._has_all(node) for node in self._cluster.nodes):
            if self.now > limit:
                raise NotLive(f"{self._standby.name}: {self._standby.rebuilding.status()}")
            await self._pass_time()
        self.counts.rebuilds += 1
        for node in self._cluster.nodes:
            self._check(node)

    # The invariants.

    def _has_all(self, node: Node) -> bool:
        end = self._cluster.master.core.log.written_end
        return node.is_whole and node.core.dispatched_position >= end

    def _check_nodes(self) -> None:
        """Who has just become whole, and now and then any."""
        if not self._cluster.master.is_up:
            return
        for node in self._cluster.nodes:
            is_new = self._checked.get(node.name) != node.log_id
            if self._has_all(node) and (is_new or self._rng.random() < CHECKED_SHARE):
                self._check(node)

    def _check(self, node: Node) -> None:
        self.counts.checks += 1
        self._checked[node.name] = node.log_id
        for (name, number), rows in self._rows.items():
            where = f"{node.name} in {name}/{number}"
            topic = node.core.catalogue.by_name.get(name)
            if topic is None:
                self._fail("SameView", f"{where}: no such topic")
                return
            last = dict(rows)
            keys = list(last)
            try:
                partition = node.partitions.get(topic, number)
                found = node.parts.lookup.get(partition, keys) if keys else []
            except FirnError as error:
                self._fail("SameView", f"{where}: {error}")
                return
            if partition.next_offset != len(rows):
                self._fail(
                    "NoOffsetTwice", f"{where}: {partition.next_offset} comes next, {len(rows)} were given"
                )
            for key, row in zip(keys, found, strict=True):
                value = None if row is None else row.value
                if value != last[key]:
                    self._fail("SameView", f"{where}: {key!r} has {_short(value)}, not {_short(last[key])}")

    def _fail(self, name: str, story: str) -> None:
        raise Violated(name, story, self.now)


def _short(value: bytes | None) -> str:
    return "no value" if value is None else repr(value.split(b" ")[0])


def simulate_rebuild(seed: int, clauses: Clauses = Clauses(), shape: Shape = Shape()) -> RebuildCounts:
    """One run. *Errors*: Violated or NotLive, with the story of its faults as notes."""
    group = RebuildGroup(seed, clauses, shape)
    with telling(group.story, seed):
        return group.run()

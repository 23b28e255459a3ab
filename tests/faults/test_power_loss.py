"""Random histories, power lost at any operation, again during recovery: what was acknowledged, or shown, is there.

One log, so one order: once something is known to be durable, all that was appended before it is. Per partition
the model keeps every record that was sent, in order, and how many of them are sure. After a loss of power the
partition must be a prefix of what was sent, cut between batches and not below what is sure. A batch whose
acknowledgement never came is sent again with its sequence: it must land once.
"""

import random
from dataclasses import dataclass, field
from typing import Any

import pytest
from engine_kit import run
from fault_kit import DATA, Machine, log_ends

from firn.errors import FirnError, SnapshotExpired
from firn.record import Record
from firn.topicspec import parse_spec
from firn_node.compaction import manifest as manifests
from firn_node.index.filesformat import unpack_snapshot

KEYS = [b"", b"a", b"b", b"c", b"dd", b"e" * 40]
SEEDS = 60
STEPS = 30
TOPICS = {"sync": "sync", "interval": "interval"}
Rows = list[tuple[bytes, bytes | None]]
LOST = (FirnError, OSError, TimeoutError)


@dataclass
class Model:
    """One topic of one partition, since it was created."""

    flush: str
    topic_id: int
    producer: int
    batches: list[Rows] = field(default_factory=list)
    sure: int = 0  # batches that must be there after a loss of power
    acknowledged: int = 0  # batches; at most one more was sent

    def rows(self, batches: int | None = None) -> Rows:
        return [row for batch in self.batches[:batches] for row in batch]


class History:
    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.machine = Machine(seed)
        self.models: dict[str, Model] = {}
        self.number = 0
        self.unsure: str | None = None  # a topic whose creation or deletion was not answered
        self.story: list[str] = []

    @property
    def kit(self):
        return self.machine.kit

    async def play(self) -> None:
        await self.machine.start()
        try:
            for _ in range(STEPS):
                if self.random.random() < 0.15:
                    self.machine.disk.cut_in(self.random.randint(1, 40))
                await self.step()
                if self.machine.disk.is_dark:
                    await self.recover()
            await self.recover()
        finally:
            if hasattr(self.machine, "kit"):
                await self.machine.end()

    async def step(self) -> None:
        steps = [self.put] * 6 + [
            self.look, self.compact, self.compact, self.seal, self.checkpoint, self.retain, self.drop, self.wait, self.stop
        ]  # fmt: skip
        chosen = self.random.choice(steps)
        self.story.append(chosen.__name__)
        try:
            name = self.random.choice(list(TOPICS))
            if name not in self.models:
                await self.create(name)
            await chosen(name)
        except LOST as error:
            if not self.machine.disk.is_dark:
                raise AssertionError(f"{chosen.__name__} failed with the power on: {error!r}") from error

    async def create(self, name: str) -> None:
        compaction = {
            "deleteRetention": self.random.choice(["0s", "1h"]), "segmentBytes": self.random.choice(["4Ki", "64Ki"]),
            "memory": "64Ki",
        }  # fmt: skip
        spec = {
            "compaction": compaction,
            "durability": {"flush": TOPICS[name]},
            "retention": {"size": "16Ki"},
        }
        self.unsure = name
        topic = await self.kit.broker.create_topic(name, parse_spec(spec))
        self.unsure = None
        self.adopt(name, topic.topic_id)

    def adopt(self, name: str, topic_id: int) -> None:
        self.number += 1
        self.models[name] = Model(TOPICS[name], topic_id, self.number)
        self.all_sure()

    async def put(self, name: str) -> None:
        model = self.models[name]
        rows: Rows = [
            (self.random.choice(KEYS), self.random.choice([None, self.random.randbytes(self.random.choice([3, 300]))]))
            for _ in range(self.random.randint(1, 12))
        ]  # fmt: skip
        model.batches.append(rows)
        await self.send(name)

    async def send(self, name: str) -> None:
        """Send the newest batch, for the first time or again."""
        model = self.models[name]
        sequence = len(model.batches) - 1
        appended = await self.kit.put(
            name, model.batches[-1], producer=(model.producer, 0, sequence), timestamps=self.machine.clock.wall_ms()
        )  # fmt: skip
        assert appended.base_offset == len(model.rows(sequence))
        model.acknowledged = len(model.batches)
        if model.flush == "sync":
            self.all_sure()

    def all_sure(self) -> None:
        for model in self.models.values():
            model.sure = model.acknowledged

    async def look(self, name: str) -> None:
        await self.check(name)
        self.models[name].sure = self.models[name].acknowledged

    async def compact(self, name: str) -> None:
        force = self.random.random() < 0.7
        compaction = await self.kit.compact(name, force=force)
        row = compaction.partitions[0]
        if row.state != "done":
            raise OSError(row.reason)

    async def seal(self, name: str) -> None:
        broker = self.kit.broker
        broker.parts.sealer.seal(broker.partitions.get(broker.topic(name), 0))

    async def checkpoint(self, _: str) -> None:
        await self.kit.broker.checkpoint()

    async def retain(self, _: str) -> None:
        broker = self.kit.broker
        await broker.checkpoint()
        await broker.parts.upkeep.retain()
        broker.core.key_query.build_missing()

    async def drop(self, name: str) -> None:
        self.unsure = name
        await self.kit.broker.delete_topic(name)
        self.unsure = None
        del self.models[name]
        self.all_sure()

    async def wait(self, _: str) -> None:
        self.machine.clock.advance(self.random.choice([1, 3600]))

    async def stop(self, _: str) -> None:
        """A clean stop and start: everything acknowledged is durable."""
        await self.machine.end()
        if not self.machine.disk.is_dark:
            self.all_sure()
            await self.machine.start()

    async def recover(self) -> None:
        """Lose power, start again (losing it again meanwhile, up to twice) and check everything."""
        await self.machine.lose_power()
        self.story.append("power lost")
        derived = self.derived()
        losses = self.random.choice([0, 1, 1, 2])
        while True:
            if losses:
                losses -= 1
                self.machine.disk.cut_in(self.random.randint(1, 25))
            try:
                await self.machine.start()
                for topic in self.kit.broker.topics():
                    await self.kit.get(topic.name, b"a")
                self.machine.disk.cut_in(None)
                if not self.machine.disk.is_dark:
                    break
                raise OSError("the power is off")
            except LOST as error:
                if not self.machine.disk.is_dark:
                    raise AssertionError(f"no start with the power on: {error!r}") from error
                await self.machine.lose_power()
                self.story.append("power lost in recovery")
                derived = {k: max(v, derived.get(k, 0)) for k, v in self.derived().items()}
        self.settle_topics()
        for name in self.models:
            await self.settle(name)
        self.check_derived(derived)
        self.all_sure()
        for name in list(self.models):
            await self.check(name)
            if self.models[name].acknowledged < len(self.models[name].batches):
                await self.send(name)
                await self.check(name)

    def settle_topics(self) -> None:
        """Take over whether a creation or deletion without an answer has happened."""
        present = {topic.name: topic.topic_id for topic in self.kit.broker.topics()}
        name, self.unsure = self.unsure, None
        if name is not None:
            before = self.models.get(name)
            if before is not None and name not in present:
                del self.models[name]
            elif before is None and name in present:
                self.adopt(name, present[name])
        assert present == {name: model.topic_id for name, model in self.models.items()}

    async def settle(self, name: str) -> None:
        """Take over how much of what was sent is there."""
        model, broker = self.models[name], self.kit.broker
        end = broker.partitions.get(broker.topic(name), 0).dispatched_end
        ends = [len(model.rows(batches)) for batches in range(len(model.batches) + 1)]
        assert end in ends, f"{name}: the end {end} is not between two batches: {ends}"
        kept = ends.index(end)
        assert kept >= model.sure, f"{name}: {kept} batches are there, {model.sure} were sure"
        # One batch without an answer may be there or not: it is sent again. Lost ones that were acknowledged
        # under `flush: interval` are sent by nobody.
        again = len(model.batches) > model.acknowledged and kept >= model.acknowledged
        model.batches = model.batches[: max(kept, model.acknowledged + 1) if again else kept]
        model.acknowledged = min(kept, len(model.batches) - 1) if again else kept

    def derived(self) -> dict[tuple[int, int], int]:
        """The greatest offset that any derived file on the disk knows, by partition."""
        found: dict[tuple[int, int], int] = {}
        for path, data in self.machine.disk.files().items():
            if path == f"{DATA}/index/CHECKPOINT":
                for key, row in unpack_snapshot(data, path).partitions.items():
                    found[key] = max(found.get(key, 0), row.end_offset)
            elif path.endswith("/MANIFEST"):
                manifest = manifests.decode(data, file=path)
                end = max([manifest.horizon, *(d.end for d in manifest.dirty)])
                key = (manifest.topic_id, manifest.partition)
                found[key] = max(found.get(key, 0), end)
        return found

    def check_derived(self, derived: dict[tuple[int, int], int]) -> None:
        broker = self.kit.broker
        ends = log_ends(broker)
        for model in self.models.values():
            known = derived.get((model.topic_id, 0), 0)
            there = broker.partitions.get(broker.core.catalogue.by_id[model.topic_id], 0).dispatched_end
            assert known <= there, f"a derived file knows offset {known}, the log ends at {there}"
            if (model.topic_id, 0) in ends:
                assert there == ends[model.topic_id, 0]

    async def check(self, name: str) -> None:
        model, kit = self.models[name], self.kit
        partition = kit.broker.partitions.get(kit.broker.topic(name), 0)
        rows = model.rows(model.acknowledged)
        extra = model.rows()[len(rows) :]  # a batch that was sent and not acknowledged may be there as well
        horizon, view = await self.view(name)
        if partition.dispatched_end == len(rows) + len(extra):
            rows += extra
        assert partition.dispatched_end == len(rows)
        check_view(rows, view, horizon=horizon)
        live = live_of(rows)
        assert live_of([(r.key, r.value) for r in view]) == live, "the map is another"
        for key in KEYS:
            assert await kit.get(name, key) == live.get(key), f"get({key!r})"
        earliest = kit.broker.parts.reader.earliest(partition)
        raw = await kit.read(name, view="raw", offset=earliest)
        assert [r.offset for r in raw] == list(range(earliest, len(rows))), "the raw view has a hole"
        assert [(r.key, r.value) for r in raw] == rows[earliest:], "the raw view is another"

    async def view(self, name: str) -> tuple[int, list[Record]]:
        """The compacted view and a horizon of its time: a compaction that is due may run meanwhile."""
        broker = self.kit.broker
        while True:
            horizon = broker.partitions.get(broker.topic(name), 0).horizon
            try:
                return horizon, await self.kit.read(name, since=horizon)
            except SnapshotExpired:
                continue


def live_of(rows: Rows) -> dict[bytes, bytes]:
    return {key: value for key, value in dict(rows).items() if value is not None}


def check_view(rows: Rows, view: list[Record], *, horizon: int) -> None:
    offsets = [r.offset for r in view]
    assert offsets == sorted(set(offsets)), "offsets ascend"
    assert all((r.key, r.value) == rows[r.offset] for r in view), "a retained offset never changes"
    newest = {key: offset for offset, (key, _) in enumerate(rows)}
    for key, offset in newest.items():
        if rows[offset][1] is not None:
            assert offset in offsets, f"the newest record of {key!r}, offset {offset}, is missing"
    below = [r.key for r in view if r.offset < horizon]
    assert len(below) == len(set(below)), "one record per key below the horizon"


def check_seed(seed: int) -> None:
    history: Any = History(seed)
    try:
        run(history.play())
    except BaseException as error:
        raise AssertionError(f"seed {seed}, after {' '.join(history.story)}: {error!r}") from error


@pytest.mark.parametrize("block", range(4))
def test_nothing_acknowledged_or_shown_is_lost_and_nothing_resurrected_by_losses_of_power(block):
    for seed in range(block * SEEDS // 4, (block + 1) * SEEDS // 4):
        check_seed(seed)

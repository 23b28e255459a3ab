"""One bit flips in a stopped broker's file: it is found and named, or repaired, and never served as data.

Every reading is the model's answer or an error; an error names the file, or the position in the commit log. Bulk
reads carry batches as they lie on the disk: there the reader's own check of the batch is the one that finds it.
What lies in the files of one topic never stops another.
"""

import asyncio
import random
from collections.abc import Callable

import pytest
from engine_kit import Kit, run
from fault_kit import DATA, Machine, PowerDisk

from firn.batch import HEADER_BYTES, Codecs, parse_header
from firn.errors import Corrupt, FirnError, MalformedBatch, SnapshotExpired
from firn_node.log.headpage import HEAD_BYTES, parse_page

SEED = 5
FLIPS = 12
TOPICS = ("a", "b")
Rows = list[tuple[bytes, bytes | None]]
Models = dict[str, Rows]

KINDS: dict[str, Callable[[str], bool]] = {
    "commit log": lambda p: p.endswith(".log"),
    "summary": lambda p: p.endswith(".summary"),
    "keys file": lambda p: p.endswith(".keys") and "/log/" in p,
    "identity": lambda p: p.endswith("/identity"),
    "index entries": lambda p: "/index/" in p and not p.endswith("CHECKPOINT"),
    "index checkpoint": lambda p: p.endswith("CHECKPOINT"),
    "manifest": lambda p: p.endswith("/MANIFEST"),
    "segment": lambda p: p.endswith(".segment"),
    "mask": lambda p: p.endswith(".mask"),
    "dirty key index": lambda p: p.endswith(".dirty"),
}


async def build() -> tuple[PowerDisk, Models]:
    """A folder with a file of every kind, of two topics; and the rows of each."""
    found = Machine(SEED, log_segment_bytes=16 << 10, min_dead_ratio=0.9)
    kit = await found.start()
    models: Models = {topic: [] for topic in TOPICS}
    rng = random.Random(SEED)

    async def put(topic: str, count: int) -> None:
        rows: Rows = [
            (b"k%03d" % rng.randrange(60), None if rng.random() < 0.1 else rng.randbytes(200))
            for _ in range(count)
        ]
        codec = rng.randrange(3)
        await kit.put(topic, rows, codecs=Codecs(codec, codec, codec))
        models[topic] += rows

    for topic in TOPICS:
        await kit.create(topic, compaction={"deleteRetention": "0s", "memory": "64Ki", "segmentBytes": "6Ki"})

    async def seal(topic: str) -> None:
        partition = kit.broker.partitions.get(kit.broker.topic(topic), 0)
        await kit.get(topic, b"k000")
        kit.broker.parts.sealer.seal(partition)
        while partition.sealing:
            await asyncio.sleep(0.005)

    for force in (True, False, None):
        for _ in range(8):
            for topic in TOPICS:
                await put(topic, 10)
        for topic in TOPICS:
            await seal(topic)
            if force is not None:
                assert (await kit.compact(topic, force=force)).state == "done"
    await kit.compact("__topics")
    kit.broker.core.key_query.build_missing()
    for topic in TOPICS:  # below the checkpoint and not sealed: its key index is made anew at first use
        await put(topic, 15)
        await put(topic, 15)
    await found.broker.checkpoint()
    for topic in TOPICS:
        await put(topic, 10)
    await found.lose_power()  # no clean stop: the log above the checkpoint is replayed
    return found.disk, models


def owners(disk: PowerDisk, path: str, position: int, topic_ids: dict[str, int]) -> set[str]:
    """The topics that may suffer from damage of a byte: those that it is of."""
    parts = path.split("/")
    named = {topic for topic, topic_id in topic_ids.items() if str(topic_id) in parts}
    if path.endswith(".log"):
        named = {
            topic for topic, topic_id in topic_ids.items() if topic_id == payload_of(disk, path, position)
        }
    return named or set(TOPICS)


def payload_of(disk: PowerDisk, path: str, position: int) -> int | None:
    """The topic id of the batch that a byte of the log is payload of; a header's bytes tell where others are."""
    data, at = disk.content(path), HEAD_BYTES
    while at < min(len(data), position + 1):
        header = parse_header(data, at)
        if at + HEADER_BYTES <= position < at + header.size:
            return header.topic_id
        at += header.size
    return None


class Checked:
    """What a flip led to: answers are compared, errors must name what is damaged."""

    def __init__(self, models: Models, path: str) -> None:
        self.models = models
        self.path = path
        self.errors: list[FirnError] = []

    async def start(self, machine: Machine) -> Kit | None:
        try:
            return await machine.start()
        except FirnError as error:
            self.named(error)
            return None

    def named(self, error: FirnError) -> None:
        assert not isinstance(error, MalformedBatch), (
            f"says that the caller's batch is malformed: {error.message}"
        )
        found = any(word in error.message for word in (self.path, "commit log", "/data/", "parked"))
        assert found, f"{type(error).__name__} names no file: {error.message}"
        self.errors.append(error)

    async def read(self, kit: Kit, topic: str, *, view: str) -> None:
        rows = self.models[topic]
        offset = 0
        if view == "raw":
            partition = kit.broker.partitions.get(kit.broker.topic(topic), 0)
            offset = kit.broker.parts.reader.earliest(partition)
        try:
            since = kit.broker.partitions.get(kit.broker.topic(topic), 0).horizon
            records = await kit.read(topic, view=view, offset=offset, since=since)
        except SnapshotExpired:  # a compaction that is due has run meanwhile
            await self.read(kit, topic, view=view)
            return
        except MalformedBatch as error:  # by the reader's own check of the bytes
            self.errors.append(error)
            return
        assert all((r.key, r.value) == rows[r.offset] for r in records), (
            f"{topic}: a {view} record has changed"
        )
        if view == "raw":
            assert [r.offset for r in records] == list(range(offset, len(rows)))
        else:
            found: dict[bytes, bytes | None] = {r.key: r.value for r in records}
            assert live(list(found.items())) == live(rows), f"{topic}: the map has changed"
            below = [r.key for r in records if r.offset < since]
            assert len(below) == len(set(below)), f"{topic}: a masked record is served"

    async def check(self, kit: Kit, topic: str) -> None:
        """Each way to read one topic, then a write and a compaction."""
        rows = self.models[topic]
        for view in ("raw", "compacted"):
            await self.tried(self.read(kit, topic, view=view))
        for number in range(60):
            await self.tried(self.get(kit, topic, b"k%03d" % number))
        await self.tried(self.query(kit, topic, b"k007"))
        written = await self.tried(kit.put(topic, [(b"new", b"1")]))
        if written:
            self.models = {**self.models, topic: [*rows, (b"new", b"1")]}
            await self.tried(self.get(kit, topic, b"new"))
        row = (await kit.compact(topic)).partitions[0]
        if row.state != "done":
            self.named(Corrupt(str(row.reason)))
        await self.tried(self.read(kit, topic, view="compacted"))

    async def tried(self, work) -> bool:
        try:
            await work
            return True
        except FirnError as error:
            self.named(error)
            return False

    async def get(self, kit: Kit, topic: str, key: bytes) -> None:
        assert await kit.get(topic, key) == live(self.models[topic]).get(key), f"{topic}: get({key!r})"

    async def query(self, kit: Kit, topic: str, key: bytes) -> None:
        found = [(r.offset, r.value) for r in await kit.broker.query(topic, key)]
        assert found == [(o, v) for o, (k, v) in enumerate(self.models[topic]) if k == key], f"{topic}: query"


def live(rows: Rows) -> dict[bytes, bytes]:
    return {key: value for key, value in dict(rows).items() if value is not None}


async def flip_one(disk: PowerDisk, models: Models, path: str, position: int, bit: int) -> list[FirnError]:
    found = Machine(SEED, disk=disk.copy(), log_segment_bytes=16 << 10, min_dead_ratio=0.9)
    topic_ids = {name: topic_id for name, topic_id in zip(TOPICS, await ids(disk), strict=True)}
    found.disk.flip(path, position, bit)
    checked = Checked(models, path)
    kit = await checked.start(found)
    if kit is None:
        return checked.errors
    hurt = owners(disk, path, position, topic_ids)
    try:
        for topic in TOPICS:
            before = len(checked.errors)
            await checked.check(kit, topic)
            if topic not in hurt:
                assert len(checked.errors) == before, (
                    f"{topic} suffers from damage in {path}: {checked.errors}"
                )
    finally:
        await found.end()
    return checked.errors


def is_vouched_for(disk: PowerDisk, path: str, position: int) -> bool:
    """Whether the log knows that the byte was durable: above, damage cannot be told from a torn write."""
    if not path.endswith(".log") or position < HEAD_BYTES:
        return True
    starts = {p: int(p[-24:-4]) for p in disk.files() if p.endswith(".log")}
    slots = [parse_page(disk.content(p)[:HEAD_BYTES], start).newest for p, start in starts.items()]
    return starts[path] + position - HEAD_BYTES < max(slot.durable_end for slot in slots if slot is not None)


async def ids(disk: PowerDisk) -> list[int]:
    found = Machine(SEED, disk=disk.copy())
    kit = await found.start()
    topic_ids = [kit.broker.topic(topic).topic_id for topic in TOPICS]
    await found.end()
    return topic_ids


BUILT: list[tuple[PowerDisk, Models]] = []


def built() -> tuple[PowerDisk, Models]:
    if not BUILT:
        BUILT.append(run(build()))
    return BUILT[0]


@pytest.mark.parametrize("kind", KINDS)
def test_a_flipped_bit_is_found_and_named_or_repaired_and_never_served(kind):
    disk, models = built()
    rng = random.Random(f"{SEED} {kind}")
    files = {path: data for path, data in disk.files().items() if KINDS[kind](path) and data}
    assert files, f"the folder has no {kind}"
    for _ in range(FLIPS):
        path = rng.choice(sorted(files))
        position, bit = rng.randrange(len(files[path])), rng.randrange(8)
        if path.endswith(".log") and rng.random() < 0.3:
            position = rng.choice([rng.randrange(64), 2048 + rng.randrange(64)])
        if not is_vouched_for(disk, path, position):
            continue
        try:
            run(flip_one(disk, models, path, position, bit))
        except BaseException as error:
            raise AssertionError(
                f"{path} byte {position} bit {bit} of {len(files[path])}: {error!r}"
            ) from error


def test_damage_in_one_topics_batch_stops_no_query_of_another():
    async def go():
        found = Machine(SEED)
        kit = await found.start()
        for topic in TOPICS:
            await kit.create(topic)
            await kit.put(topic, [(b"key", topic.encode())])
        path = sorted(p for p in found.disk.files() if p.endswith(".log"))[-1]
        found.disk.flip(path, found.disk.content(path).index(b"key"))
        assert [r.value for r in await kit.broker.query("b", b"key")] == [b"b"]
        with pytest.raises(Corrupt, match=path):
            await kit.broker.query("a", b"key")
        await found.end()

    run(go())


def test_damaged_topic_records_are_named_at_start_and_no_file_is_removed():
    async def go():
        disk, _ = built()
        found = Machine(SEED, disk=disk.copy())
        path = next(
            p for p in sorted(disk.files()) if p.startswith(f"{DATA}/compacted/1/") and p.endswith(".segment")
        )
        found.disk.flip(path, 150)
        before = {p for p in found.disk.files() if "/compacted/" in p}
        with pytest.raises(Corrupt, match=f"{DATA}/compacted/1/0"):
            await found.start()
        assert {p for p in found.disk.files() if "/compacted/" in p} == before

    run(go())


def test_an_index_that_was_removed_is_made_anew_from_the_log():
    async def go():
        disk, models = built()
        found = Machine(SEED, disk=disk.copy(), log_segment_bytes=16 << 10)
        found.disk.flip(f"{DATA}/index/files/CHECKPOINT", 50)
        with pytest.raises(Corrupt, match="remove the index folder, it is rebuilt from the log"):
            await found.start()
        found.disk.remove_tree(f"{DATA}/index/files")
        kit = await found.start()
        checked = Checked(models, "")
        for topic in TOPICS:
            await checked.check(kit, topic)
        assert checked.errors == []
        await found.end()

    run(go())

"""A replica that starts anew, or has fallen behind the start of its master's log, is rebuilt by messages."""

import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engine_kit import run
from group_kit import BrokerGroup, Replica, broker_group

from firn.errors import Corrupt, Invalid, Unavailable
from firn.topicspec import parse_spec
from firn.types import OFFSETS_TOPIC, TOPICS_TOPIC
from firn_node import failpoints
from firn_node.replication.state import Role


def a_standby(group: BrokerGroup) -> Replica:
    return next(replica for replica in group.up if replica.role is Role.STANDBY)


async def restart(replica: Replica) -> None:
    await replica.stop()
    await replica.start()


def test_a_standby_that_is_told_to_start_anew_joins_under_another_log_id(tmp_path: Path) -> None:
    async def story() -> None:
        async with broker_group(tmp_path) as group:
            master = await group.until_master()
            await master.broker.create_topic("t", parse_spec({"durability": {"minInSync": 2}}))
            await master.kit.put("t", [(b"k", b"v")])
            standby = a_standby(group)
            before = standby.broker.core.identity.log_id
            await standby.broker.rebuild("a test")
            assert "a test" in await standby.broker.failed()
            await restart(standby)
            assert standby.broker.core.identity.log_id != before
            await group.until_in_sync()
            assert await group.maps("t", [b"k"]) == [[b"v"]] * 3

    run(story())


def test_a_master_and_the_last_in_sync_replica_are_not_rebuilt(tmp_path: Path) -> None:
    async def story() -> None:
        async with broker_group(tmp_path, replicas=2) as group:
            master = await group.until_master()
            with pytest.raises(Invalid, match="hand over first"):
                await master.broker.rebuild("a test")
            await a_standby(group).stop()
            record = next(iter(group.records.by_group))
            own = master.broker.core.identity.log_id
            await group.until(lambda: group.records.by_group[record].in_sync == {own}, "it is alone")
            assert master.broker.group is not None
            master.broker.group.damaged("a test")
            assert not master.broker.starts_anew
            with pytest.raises(Unavailable):
                await master.broker.rebuild("a test")

    run(story())


SMALL_LOG: dict[str, Any] = {"log_segment_bytes": 64 << 10}
SMALL_SEGMENTS = {"deleteRetention": "0s", "segmentBytes": "64Ki"}
LETS_GO = {"retention": {"time": "0s", "size": 0}, "compaction": {"deleteRetention": "0s"}}


async def trimmed(group: BrokerGroup, master: Replica, size: int = 400, **spec: Any) -> dict[bytes, bytes]:
    """The topic ``t`` with keys that were put and deleted, compacted, its log gone; what it holds."""
    name = "t"
    await master.broker.create_topic(name, parse_spec({**LETS_GO, **spec}))
    await write(master, name, 0, size=size)
    return await compacted(group, master, name)


async def write(master: Replica, name: str, first: int, size: int = 400) -> None:
    """200 keys, each fifth of them deleted again, in both partitions if there are two."""
    for number in range(master.broker.topic(name).spec.partitions):
        keys = [b"%d-%04d" % (number, at) for at in range(first, first + 200)]
        await master.kit.put(name, [(key, b"%04d" % first * (size // 4)) for key in keys], partition=number)
        await master.kit.put(name, [(key, None) for key in keys[::5]], partition=number)


async def compacted(
    group: BrokerGroup, master: Replica, name: str, *, everywhere: bool = True
) -> dict[bytes, bytes]:
    """Compact by force, on the master or everywhere, let go of the log, and return the map of all partitions."""
    filler = f"{name}-filler"
    await master.broker.create_topic(filler, parse_spec(LETS_GO))
    for at in range(20):  # so that what was written before lies in sealed segments
        await master.kit.put(filler, [(b"k", b"%d" % at * 8000)])
    await group.until_equal()
    start = master.broker.core.log.start
    for replica in group.up if everywhere else [master]:
        for topic in (name, filler, TOPICS_TOPIC, OFFSETS_TOPIC):
            await replica.kit.compact_here(topic)
        await replica.broker.checkpoint()
    await group.until(lambda: master.broker.core.log.start > start, "retention lets go of the log")
    found: dict[bytes, bytes] = {}
    for number in range(master.broker.topic(name).spec.partitions):
        found |= await master.kit.map(name, partition=number)
    return found


async def start_anew(replica: Replica) -> None:
    await replica.broker.rebuild("a test")
    await restart(replica)


def holds(replica: Replica, name: str, expected: dict[bytes, bytes], gone: list[bytes]) -> bool:
    """Whether a broker, whoever may be served by it, has these values and not those keys."""
    broker = replica.broker
    topic = broker.topic(name)
    keys = [*expected, *gone]
    found: dict[bytes, bytes | None] = {}
    for number in range(topic.spec.partitions):
        some = [key for key in keys if key.startswith(b"%d-" % number)]
        rows = broker.parts.lookup.get(broker.partitions.get(topic, number), some)
        found |= {key: None if row is None else row.value for key, row in zip(some, rows, strict=True)}
    return found == {**expected, **dict.fromkeys(gone)}


def test_a_blank_standby_gets_what_the_log_no_longer_tells(tmp_path: Path) -> None:
    async def story() -> None:
        async with broker_group(tmp_path, **SMALL_LOG) as group:
            master = await group.until_master()
            expected = await trimmed(group, master, partitions=2)
            assert master.broker.core.log.start > 4096
            standby = a_standby(group)
            await start_anew(standby)
            await group.until_in_sync()
            await group.until_equal()
            assert len(expected) == 320
            assert holds(standby, "t", expected, gone(2))
            ends = [
                [r.broker.partitions.get(r.broker.topic("t"), n).next_offset for n in range(2)]
                for r in (master, standby)
            ]
            assert ends[0] == ends[1]
            assert standby.broker.core.log.start > 4096

    run(story())


class Stopped(Exception):
    """What a thread of a rebuild ends with, where a test lets it crash."""


class Steps:
    """Stands at the steps of a rebuild: counts them, and holds or ends the thread that reaches one."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._crash_at: tuple[str, int] | None = None
        self._hold_at = ""
        self._hold_from = 0
        self._is_held = threading.Event()
        self._goes_on = threading.Event()

    def __call__(self, name: str) -> None:
        if not name.startswith("rebuild."):
            return
        self.counts[name] += 1
        if self._crash_at == (name, self.counts[name]):
            raise Stopped(name)
        if self._hold_at == name and self.counts[name] >= self._hold_from:
            self._is_held.set()
            assert self._goes_on.wait(60)

    def crash_at(self, name: str, count: int) -> None:
        self._crash_at = (name, self.counts[name] + count)

    def hold_at(self, name: str, count: int = 1) -> None:
        """From the time on when it is reached so often."""
        self._hold_at = name
        self._hold_from = self.counts[name] + count

    @property
    def is_held(self) -> bool:
        return self._is_held.is_set()

    def go_on(self) -> None:
        self._hold_at = ""
        self._goes_on.set()


@pytest.fixture
def steps() -> Iterator[Steps]:
    found = failpoints.hook = Steps()
    yield found
    found.go_on()
    failpoints.hook = None


def gone(partitions: int, first: int = 0) -> list[bytes]:
    return [b"%d-%04d" % (n, at) for n in range(partitions) for at in range(first, first + 200, 5)]


def pins(replica: Replica) -> int:
    """How often a partition was pinned at a master."""
    return replica.server.context.counts.requests["POST", "/v1/replicate/pins", 201]


async def until_rebuilt(group: BrokerGroup) -> None:
    await group.until_in_sync()
    await group.until_equal()


def test_a_rebuild_that_crashed_goes_on_with_the_partitions_that_are_left(
    tmp_path: Path, steps: Steps
) -> None:
    async def story() -> None:
        async with broker_group(tmp_path, **SMALL_LOG) as group:
            master = await group.until_master()
            expected = await trimmed(group, master, partitions=4)
            standby = a_standby(group)
            steps.crash_at("rebuild.partition_pulled", 4)
            await start_anew(standby)
            assert "the rebuild failed" in await standby.broker.failed()
            before = standby.broker.core.identity.log_id
            pinned = pins(master)
            whole = {path.parent for path in (standby.folder / "rebuild").rglob("MANIFEST")}
            assert len(whole) >= 2
            await restart(standby)
            await until_rebuilt(group)
            assert standby.broker.core.identity.log_id == before
            assert holds(standby, "t", expected, gone(4))
            # __topics, the filler's and the four partitions, less those that were whole
            assert pins(master) - pinned <= 6 - len(whole)
            await group.until(lambda: not (standby.folder / "rebuild").exists(), "nothing is left over")

    run(story())


@pytest.mark.parametrize("step", ["rebuild.place_free", "rebuild.installed"])
def test_a_crash_while_the_pulled_folders_take_their_place_loses_nothing(
    tmp_path: Path, steps: Steps, step: str
) -> None:
    async def story() -> None:
        async with broker_group(tmp_path, **SMALL_LOG) as group:
            master = await group.until_master()
            expected = await trimmed(group, master)
            standby = a_standby(group)
            steps.crash_at(step, 1)
            await start_anew(standby)
            assert "the rebuild failed" in await standby.broker.failed()
            pinned = pins(master)
            await restart(standby)
            await until_rebuilt(group)
            assert holds(standby, "t", expected, gone(1))
            assert pins(master) == pinned

    run(story())


def test_a_key_that_is_deleted_and_compacted_away_during_the_pull_never_comes_back(
    tmp_path: Path, steps: Steps
) -> None:
    async def story() -> None:
        async with broker_group(tmp_path, **SMALL_LOG) as group:
            master = await group.until_master()
            expected = await trimmed(group, master)
            standby = a_standby(group)
            steps.hold_at("rebuild.segment_pulled")
            await start_anew(standby)
            await group.until(lambda: steps.is_held, "a segment was pulled")
            victim = next(iter(expected))
            await master.kit.put("t", [(victim, None), (b"0-new", b"put")])
            await master.kit.put("t", [(b"0-new", None)])
            for _ in range(2):
                await master.kit.compact("t")
            del expected[victim]
            assert await master.kit.map("t") == expected
            steps.go_on()
            await until_rebuilt(group)
            assert holds(standby, "t", expected, [*gone(1), victim, b"0-new"])

    run(story())


@pytest.mark.parametrize("how", ["restarts", "is replaced"])
def test_a_rebuild_goes_on_when_its_master(tmp_path: Path, steps: Steps, how: str) -> None:
    async def story() -> None:
        async with broker_group(tmp_path, **SMALL_LOG) as group:
            master = await group.until_master()
            expected = await trimmed(group, master, partitions=2)
            standby = a_standby(group)
            steps.hold_at("rebuild.partition_pulled")
            await start_anew(standby)
            await group.until(lambda: steps.is_held, "a partition was pulled")
            await master.fail()
            if how == "restarts":
                await master.start()
            else:
                await group.until_master(other_than=master)
            steps.go_on()
            await group.until(lambda: standby.role is Role.STANDBY, "it is rebuilt")
            if how == "is replaced":
                await master.start()
            await until_rebuilt(group)
            assert holds(standby, "t", expected, gone(2))

    run(story())


def test_a_new_master_compacts_what_begins_before_the_log_of_who_is_rebuilt(
    tmp_path: Path, steps: Steps
) -> None:
    async def story() -> None:
        async with broker_group(tmp_path, **SMALL_LOG) as group:
            master = await group.until_master()
            await master.broker.create_topic("t", parse_spec(LETS_GO))
            await write(master, "t", 0)
            expected = await compacted(group, master, "t", everywhere=False)
            standby = a_standby(group)
            steps.hold_at("rebuild.partition_pulled")
            await start_anew(standby)
            await group.until(lambda: steps.is_held, "a partition was pulled")
            await master.fail()
            second = await group.until_master(other_than=master)
            assert second.broker.core.log.start < standby.broker.core.log.start
            assert second.broker.compaction("t-filler") is None
            steps.go_on()
            await group.until(lambda: standby.role is Role.STANDBY, "it is rebuilt")
            assert second.broker.compaction("t-filler") is not None
            await master.start()
            await until_rebuilt(group)
            assert holds(standby, "t", expected, gone(1))

    run(story())


def test_a_pin_that_is_gone_starts_its_partition_over(tmp_path: Path, steps: Steps) -> None:
    async def story() -> None:
        async with broker_group(tmp_path, min_dead_ratio=1.0, **SMALL_LOG) as group:
            master = await group.until_master()
            await trimmed(group, master, size=9000, compaction=SMALL_SEGMENTS)
            await write(master, "t", 120, size=9000)  # some keys anew: their older rows are masked
            partition = master.broker.partitions.get(master.broker.topic("t"), 0)
            assert master.broker.partitions.active(partition).end == partition.dispatched_end
            master.broker.parts.sealer.seal(partition)
            log = partition.log
            await group.until(lambda: log.manifest.dirty, "it is sealed")
            await master.kit.compact("t", force=False)
            assert any(segment.masked for segment in log.manifest.segments)
            assert len(log.manifest.segments) >= 5
            expected = await master.kit.map("t")
            standby = a_standby(group)
            before = pins(master)
            steps.hold_at("rebuild.segment_pulled", 3)  # other partitions have two segments
            await start_anew(standby)
            await group.until(lambda: steps.is_held, "segments were pulled")
            master.broker.pinned_source().take_all_back()
            await master.kit.compact("t")  # the files are other ones now
            partitions = standby.broker.status()["brokers"][0]["rebuild"]["partitions"]
            steps.go_on()
            await until_rebuilt(group)
            assert pins(master) - before > partitions
            assert holds(
                standby, "t", expected, [key for key in gone(1) + gone(1, 120) if key not in expected]
            )

    run(story())


def test_a_rebuilt_node_that_is_elected_knows_producers_and_offsets_that_its_log_does_not(
    tmp_path: Path,
) -> None:
    async def story() -> None:
        async with broker_group(tmp_path, replicas=2, **SMALL_LOG) as group:
            master = await group.until_master()
            await master.broker.create_topic("t", parse_spec(LETS_GO))
            first = await master.kit.put("t", [(b"0-k", b"v")], producer=(7, 0, 0))
            last = await master.kit.put("t", [(b"0-k", None)])  # the newest row is a dropped tombstone
            await master.broker.commit_offsets("report", "t", {0: (1, None)})
            await compacted(group, master, "t")
            standby = a_standby(group)
            await start_anew(standby)
            await until_rebuilt(group)
            assert standby.broker.core.log.start > 4096
            await master.fail()
            await group.until(lambda: standby.broker.is_ready() and standby.role is Role.MASTER, "elected")
            again = await standby.kit.put("t", [(b"0-k", b"v")], producer=(7, 0, 0))
            assert again.base_offset == first.base_offset
            following = await standby.kit.put("t", [(b"0-k", b"w")], producer=(7, 0, 1))
            assert following.base_offset == last.base_offset + 1
            assert await standby.broker.fetch_offsets("report", "t") == {0: (1, None)}

    run(story())


def test_a_rebuilt_node_goes_on_counting_light_queues(tmp_path: Path) -> None:
    async def story() -> None:
        async with broker_group(tmp_path, replicas=2, **SMALL_LOG) as group:
            master = await group.until_master()
            await master.broker.create_topic("t", parse_spec(LETS_GO))
            for _ in range(3):
                await master.kit.put("t", [(b"0-k", b"v")], queues=[["q"]])
            await compacted(group, master, "t")
            standby = a_standby(group)
            await start_anew(standby)
            await until_rebuilt(group)
            topic_id = master.broker.topic("t").topic_id
            await master.kit.put("t", [(b"0-k", b"v")], queues=[["q"]])
            await group.until_equal()
            assert [r.broker.core.index.light_bounds(topic_id, 0, "q") for r in group.up] == [(3, 4)] * 2

    run(story())


def test_a_standby_that_was_away_while_the_log_let_go_of_what_it_lacks_is_rebuilt(tmp_path: Path) -> None:
    async def story() -> None:
        async with broker_group(tmp_path, **SMALL_LOG) as group:
            master = await group.until_master()
            await master.broker.create_topic("t", parse_spec(LETS_GO))
            await write(master, "t", 0)
            await group.until_equal()
            standby = a_standby(group)
            before = standby.broker.core.identity.log_id
            await standby.stop()
            record = next(iter(group.records.by_group))
            await group.until(lambda: before not in group.records.by_group[record].in_sync, "it is given up")
            await write(master, "t", 200)
            assert master.broker.group is not None
            master.broker.group.let_go_of_log()  # as a full disk does; else it would be held back for a while
            expected = await compacted(group, master, "t")
            await standby.start()
            assert "gone from its log" in await standby.broker.failed()
            await restart(standby)
            assert standby.broker.core.identity.log_id != before
            await until_rebuilt(group)
            assert holds(standby, "t", expected, gone(1) + gone(1, 200))

    run(story())


def damage(replica: Replica) -> None:
    """Flip a byte of what it had promised to its group."""
    path = replica.folder / "group"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def test_a_damaged_folder_starts_anew_only_where_another_replica_has_everything(tmp_path: Path) -> None:
    async def story() -> None:
        async with broker_group(tmp_path, replicas=2) as group:
            master = await group.until_master()
            await master.broker.create_topic("t", parse_spec({}))
            await master.kit.put("t", [(b"0-k", b"v")])
            await group.until_equal()
            standby = a_standby(group)
            before = standby.broker.core.identity.log_id
            await standby.stop()
            damage(standby)
            record = next(iter(group.records.by_group))
            own = master.broker.core.identity.log_id
            await standby.start()
            assert standby.broker.core.identity.log_id != before
            await until_rebuilt(group)
            assert await group.maps("t", [b"0-k"]) == [[b"v"]] * 2
            await standby.stop()
            await group.until(lambda: group.records.by_group[record].in_sync == {own}, "it is alone")
            await master.stop()
            damage(master)
            with pytest.raises(Corrupt):
                await master.start()
            assert (master.folder / "identity").exists()

    run(story())

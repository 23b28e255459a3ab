"""Turning one kind of index into another: all of it arrives, or the old one stays."""

from pathlib import Path

import pytest

from firn.errors import Corrupt, FirnError, Invalid, LimitExceeded, Unavailable
from firn_node import failpoints
from firn_node.disk import RealDisk
from firn_node.index import NewEntry, NewLight, PartitionIndex, migrate, open_index, verify

MEMORY = 4 << 20


class Crash(BaseException):
    pass


def opened(kind: str, data: Path) -> PartitionIndex:
    return open_index(kind, str(data / "index"), RealDisk(data), memory_bytes=MEMORY)


def fill(index: PartitionIndex) -> None:
    for group in range(30):
        at = group * 300
        index.append(
            [NewEntry(8, p, group * 10, group * 10 + 10, at + p * 100, 100, p, 99 - group) for p in range(3)]
        )
    index.append([NewEntry(16, 0, 0, 5, 0, 100, 1, 5)])  # all of it expires below
    for p in range(3):
        index.put_state(8, p, b"state%d" % p)
        index.put_producer(8, p, 77, bytes(8) + b"row%d" % p)
    index.trim(3000)
    index.flush(9000)


def check_filled(index: PartitionIndex) -> None:
    assert index.checkpoint == 9000
    assert index.log_start == 3000
    for p in range(3):
        assert index.bounds(8, p, 0) == (100, 300)
        entries = index.scan(8, p, 0)
        assert [e.base_offset for e in entries] == list(range(100, 300, 10))
        assert {(e.tag_hash, e.max_timestamp, e.size) for e in entries} == {(p, 99, 100)}
        assert index.producer(8, p, 77) == bytes(8) + b"row%d" % p
    assert index.bounds(16, 0, 0) == (5, 5)
    assert list(index.states()) == [(8, p, b"state%d" % p) for p in range(3)]


PAIRS = [("rocksdb", "files"), ("files", "rocksdb"), ("rocksdb", "mirrored"), ("mirrored", "files")]


@pytest.mark.parametrize(("before", "after"), PAIRS)
def test_a_migrated_index_answers_as_the_old_one_did(before: str, after: str, tmp_path: Path) -> None:
    index = opened(before, tmp_path)
    fill(index)
    index.close()
    done = migrate(str(tmp_path), after, RealDisk(tmp_path))
    assert (done.before, done.after) == (before, after)
    assert migrate(str(tmp_path), after, RealDisk(tmp_path)).entries == 0
    index = opened(after, tmp_path)
    check_filled(index)
    index.close()
    names = {path.name for path in (tmp_path / "index").iterdir()}
    assert names == ({"rocksdb", "files"} if after == "mirrored" else {after})


STEPS = [
    "index.migrate.filled",
    "index.migrate.copied",
    "index.migrate.verified",
    "index.migrate.renamed",
    "index.migrate.built",
    "index.retire.renamed",
]


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize(("before", "after"), PAIRS[:2])
def test_a_migration_that_dies_at_any_step_can_be_repeated(
    before: str, after: str, step: str, tmp_path: Path
) -> None:
    index = opened(before, tmp_path)
    fill(index)
    index.close()

    def hook(name: str) -> None:
        if name == step:
            raise Crash(name)

    failpoints.hook = hook
    try:
        with pytest.raises(Crash):
            migrate(str(tmp_path), after, RealDisk(tmp_path))
    finally:
        failpoints.hook = None
    migrate(str(tmp_path), after, RealDisk(tmp_path))
    index = opened(after, tmp_path)
    check_filled(index)
    index.close()
    assert {path.name for path in (tmp_path / "index").iterdir()} == {after}


@pytest.mark.parametrize("step", STEPS[:3])
def test_after_a_migration_that_died_early_the_old_index_is_in_force(step: str, tmp_path: Path) -> None:
    index = opened("rocksdb", tmp_path)
    fill(index)
    index.close()

    def hook(name: str) -> None:
        if name == step:
            raise Crash(name)

    failpoints.hook = hook
    try:
        with pytest.raises(Crash):
            migrate(str(tmp_path), "files", RealDisk(tmp_path))
    finally:
        failpoints.hook = None
    index = opened("rocksdb", tmp_path)
    check_filled(index)
    index.close()


def test_light_queues_and_too_many_partitions_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    index = opened("rocksdb", tmp_path)
    index.append([NewEntry(8, 0, 0, 1, 0, 8, 0, 0)], [NewLight(8, 0, "q", 0, 0, 0, 0)])
    index.flush(8)
    with pytest.raises(FirnError):
        migrate(str(tmp_path / "none"), "files", RealDisk(tmp_path))
    index.close()
    with pytest.raises(Invalid, match="light queues"):
        migrate(str(tmp_path), "files", RealDisk(tmp_path))
    index = opened("rocksdb", tmp_path)
    index.delete_topic(8)
    index.append([NewEntry(16, p, 0, 1, p * 8, 8, 0, 0) for p in range(10_001)])
    index.flush(8)
    index.close()
    with pytest.raises(LimitExceeded, match="10000 partitions"):
        migrate(str(tmp_path), "mirrored", RealDisk(tmp_path))
    assert {path.name for path in (tmp_path / "index").iterdir()} == {"rocksdb"}


def test_a_migration_beside_a_running_broker_is_refused(tmp_path: Path) -> None:
    opened("rocksdb", tmp_path).close()
    disk = RealDisk(tmp_path)
    with disk.lock(str(tmp_path / "LOCK")), pytest.raises(Unavailable, match="a broker runs"):
        migrate(str(tmp_path), "files", disk)


def test_another_kind_than_the_one_there_is_refused_with_the_way_out(tmp_path: Path) -> None:
    opened("files", tmp_path).close()
    with pytest.raises(Invalid, match="firn index migrate --to rocksdb"):
        opened("rocksdb", tmp_path)
    with pytest.raises(Invalid, match="unknown index kind"):
        opened("paper", tmp_path)


def test_verify_names_what_differs_and_where(tmp_path: Path) -> None:
    left, right = opened("rocksdb", tmp_path / "a"), opened("files", tmp_path / "b")
    fill(left)
    fill(right)
    assert verify(left, right) == []
    left.append([NewEntry(8, 1, 300, 310, 9000, 100, 0, 0)])
    right.append([NewEntry(8, 1, 300, 310, 9008, 100, 0, 0)])
    assert len(verify(left, right)) == 1
    assert "topic 8 partition 1 offset 300" in verify(left, right)[0]
    right.put_state(8, 2, b"other")
    left.put_producer(8, 9, 1, bytes(8))
    left.append([NewEntry(8, 5, 0, 1, 9100, 8, 0, 0)])
    found = verify(left, right)
    assert [text.split(":")[0] for text in found] == [
        "topic 8 partition 1 offset 300",
        "topic 8 partition 5",
        "topic 8 partition 5 offset 0",
        "state (8, 2)",
        "producer (8, 9, 1)",
    ]
    assert len(verify(left, right, limit=2)) == 2
    left.close()
    right.close()


def test_a_flipped_bit_in_a_file_is_named_with_its_position(tmp_path: Path) -> None:
    index = opened("files", tmp_path)
    fill(index)
    index.close()
    path = tmp_path / "index/files/8/1" / f"{0:020d}"
    data = bytearray(path.read_bytes())
    data[15 * 48 + 3] ^= 1
    path.write_bytes(data)
    index = opened("files", tmp_path)
    with pytest.raises(Corrupt, match=f"{path} at {15 * 48}"):
        index.scan(8, 1, 0)
    index.close()
    checkpoint = tmp_path / "index/files/CHECKPOINT"
    data = bytearray(checkpoint.read_bytes())
    data[-1] ^= 1
    checkpoint.write_bytes(data)
    with pytest.raises(Corrupt, match="CHECKPOINT: checksum"):
        opened("files", tmp_path)

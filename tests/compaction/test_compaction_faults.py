"""Crashes, damage and failing disks: old or new state, never a mixture, never a resurrected record."""

import errno
import itertools
import os

import numpy as np
import pytest

from firn.errors import Corrupt, Invalid
from firn_node import failpoints
from firn_node.compaction.keyindex import KeyIndexWriter
from support.compaction_kit import Partition, rows_of, run


class Crash(BaseException):
    """Stands for SIGKILL: no handler of an Exception sees it."""


STEPS = [
    "seal.written", "swap.folder_synced", "swap.manifest_written", "swap.manifest_synced", "swap.manifest_renamed",
    "swap.done", "compact.decided", "compact.segments_synced", "compact.masks_synced",
]  # fmt: skip


@pytest.fixture
def failpoint():
    yield lambda hook: setattr(failpoints, "hook", hook)
    failpoints.hook = None


def history(partition):
    partition.append([b"k%03d" % i for i in range(200)], [b"v" * 100] * 200)
    partition.compact(retention=0)
    partition.append([b"k%03d" % i for i in range(0, 80, 2)], [None if i % 3 else b"new" for i in range(40)])


@pytest.mark.parametrize("step", STEPS)
def test_a_crash_at_any_step_leaves_the_old_or_the_new_state_and_no_leftovers(tmp_path, step, failpoint):
    partition = Partition(str(tmp_path))
    history(partition)
    if step != "seal.written":
        partition.seal()
    before, floor = partition.compacted.manifest, partition.floor

    def crash(name):
        if name == step:
            raise Crash

    failpoint(crash)
    job = partition.job(retention=0)

    def go():
        partition.seal()
        run([job], partition.log, partition.now, min_dead_ratio=0.9)

    with pytest.raises(Crash):
        go()
    failpoint(None)
    partition.open()
    after = partition.compacted.manifest
    if after.horizon > before.horizon:
        assert step in ("swap.manifest_renamed", "swap.done")
        partition.follow(job)
    else:
        assert partition.floor == floor
    partition.check()
    partition.sealed = max(partition.sealed, after.horizon, after.dirty[-1].end if after.dirty else 0)
    partition.compact(retention=0, force=True)
    partition.check()


def flip(partition, name, position):
    path = os.path.join(partition.folder, name)
    with open(path, "r+b") as file:
        file.seek(position if position >= 0 else os.path.getsize(path) + position)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 0x10]))


@pytest.mark.parametrize("part", ["key index", "batch index", "footer", "tables"])
def test_a_damaged_index_is_rebuilt_from_the_batches(tmp_path, part):
    partition = Partition(str(tmp_path))
    history(partition)
    partition.compact(retention=0, min_dead_ratio=0.9)
    segment = partition.compacted.manifest.segments[0]
    at = {
        "batch index": segment.bytes + 5,
        "key index": segment.bytes + 48 * segment.batches + 100,
        "tables": -112 - 3,
        "footer": -50,
    }[part]
    flip(partition, segment.name, at)
    partition.open()
    partition.check()
    partition.append([b"k001", b"new"], [None, b"1"])
    partition.compact(retention=0, min_dead_ratio=0.9)
    partition.check()
    partition.compact(force=True, retention=0)
    partition.check()


@pytest.mark.parametrize("damage", ["flipped", "missing"])
def test_a_damaged_mask_is_decided_anew_and_serves_no_masked_row(tmp_path, damage):
    partition = Partition(str(tmp_path))
    history(partition)
    partition.compact(retention=0, min_dead_ratio=0.9)
    masks = [s.mask for s in partition.compacted.manifest.segments if s.mask]
    assert len(masks) == 2
    for name in masks:
        if damage == "missing":
            os.unlink(os.path.join(partition.folder, name))
        else:
            flip(partition, name, 30)
    partition.open()
    assert partition.served() == partition.expected()
    partition.append([b"k001"], [b"again"])
    partition.compact(retention=0, min_dead_ratio=0.9)
    assert partition.served() == partition.expected()
    partition.compact(retention=0, force=True)
    partition.check()


def test_a_damaged_sealed_dirty_key_index_is_rebuilt_from_the_commit_log(tmp_path):
    partition = Partition(str(tmp_path))
    partition.append([b"a", b"b", b"a"], [b"1", b"2", None])
    partition.seal()
    flip(partition, partition.compacted.manifest.dirty[0].name, 3)
    partition.open()
    assert list(partition.compacted.dirty_newest(*[int(x[0]) for x in (partition.hi, partition.lo)])) == [
        2,
        0,
    ]
    flip(partition, partition.compacted.manifest.dirty[0].name, 3)
    partition.open()
    partition.compact()
    partition.check()


def test_damaged_batch_bytes_are_corrupt_and_named(tmp_path):
    partition = Partition(str(tmp_path))
    history(partition)
    partition.compact(retention=0, min_dead_ratio=0.9)
    segment = partition.compacted.manifest.segments[0]
    flip(partition, segment.name, segment.bytes - 10)
    partition.open()
    hi, lo = int(partition.hi[199]), int(partition.lo[199])
    with pytest.raises(Corrupt, match=segment.name) as caught:
        partition.compacted.newest(b"k199", hi, lo)
    assert caught.value.details["position"] == 0
    job = partition.job(force=True)
    run([job], partition.log, partition.now)
    assert job.result.state == "failed"
    assert segment.name in (job.result.reason or "")
    names = set(os.listdir(partition.folder)) - {"MANIFEST"}
    assert names == partition.compacted.manifest.files()


def test_a_damaged_manifest_is_corrupt_and_nothing_is_deleted(tmp_path):
    partition = Partition(str(tmp_path))
    history(partition)
    names = sorted(os.listdir(partition.folder))
    flip(partition, "MANIFEST", 40)
    with pytest.raises(Corrupt, match="MANIFEST at byte 12: expected CRC"):
        partition.open()
    assert sorted(os.listdir(partition.folder)) == names


def test_a_pinned_generation_is_read_to_the_end_while_compactions_replace_its_files(tmp_path):
    partition = Partition(str(tmp_path))
    history(partition)
    expected = partition.expected()
    pin = partition.compacted.pin()
    partition.compact(retention=0, force=True)
    partition.append([b"k%03d" % i for i in range(200)], [b"3"] * 200)
    partition.compact(retention=0, force=True)
    found, offset = [], 0
    while offset < pin.manifest.horizon:
        parts, offset = partition.compacted.read(offset, 1000, pin=pin)
        found += rows_of(parts)
    assert found == expected
    assert set(os.listdir(partition.folder)) > partition.compacted.manifest.files() | {"MANIFEST"}
    pin.release()
    partition.check()


def test_a_range_that_is_being_sent_outlives_the_file_name(tmp_path):
    partition = Partition(str(tmp_path))
    history(partition)
    parts, _ = partition.compacted.read(0, 1 << 20)
    expected = partition.expected()
    partition.compact(retention=0, force=True)
    assert rows_of(parts) == expected
    partition.check()


@pytest.mark.parametrize("call", ["open", "pwrite", "sync", "sync_folder", "rename"])
def test_a_disk_error_fails_the_job_and_keeps_the_old_state(tmp_path, call, monkeypatch):
    partition = Partition(str(tmp_path))
    history(partition)
    before = partition.served()
    disk = partition.disk
    target = disk if hasattr(disk, call) else None
    if target is None:
        from firn_node.disk import RealFile

        target = RealFile

    def fail(*_args, **_kwargs):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    job = partition.job(retention=0)
    if call == "open":  # reading goes on, making files fails
        real = disk.open
        monkeypatch.setattr(disk, "open", lambda p, mode="read": real(p, mode) if mode == "read" else fail())
    else:
        monkeypatch.setattr(target, call, fail)
    run([job], partition.log, partition.now)
    monkeypatch.undo()
    assert job.result.state == "failed"
    assert "No space left" in (job.result.reason or "")
    assert partition.served() == before
    partition.check()
    partition.compact(retention=0)
    partition.check()


def test_when_the_folder_cannot_be_synced_after_the_rename_both_generations_stay(tmp_path, monkeypatch):
    partition = Partition(str(tmp_path))
    history(partition)
    disk, old = partition.disk, partition.compacted.manifest
    real, calls = disk.sync_folder, []

    def fail_second(folder):
        calls.append(folder)
        if len(calls) == 2:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(folder)

    monkeypatch.setattr(disk, "sync_folder", fail_second)
    job = partition.job(retention=0)
    run([job], partition.log, partition.now)
    monkeypatch.undo()
    assert job.result.state == "failed"
    assert partition.compacted.manifest == old
    assert partition.served() == partition.expected()
    partition.open()  # the rename has reached the disk: the new generation is whole
    assert partition.compacted.manifest.horizon == partition.end
    partition.follow(job)
    partition.check()


def test_keys_only_reads_send_header_and_keys_part_of_each_batch(tmp_path):
    partition = Partition(str(tmp_path))
    history(partition)
    partition.compact(retention=0, min_dead_ratio=0.9)
    parts, next_offset = partition.compacted.read(0, 1 << 20, keys_only=True)
    from firn.wire import items

    data = b"".join(p if isinstance(p, bytes) else p.read() for p in parts)
    for p in parts:
        if not isinstance(p, bytes):
            p.lease.release()
    found = []
    for item in items(data, keys_only=True):
        assert not item.batch.has_values
        item.batch.verify()
        keep = [not m for m in item.masked] if item.masked is not None else [True] * item.batch.header.records
        offsets = item.batch.columns.offsets.tolist()
        found += [o for o, k in zip(offsets, keep, strict=True) if k]
    assert found == [r.offset for r in partition.expected()]
    assert next_offset == partition.compacted.manifest.horizon
    assert partition.compacted.read(next_offset, 1) == ([], next_offset)


def test_a_removed_log_leaves_no_folder(tmp_path):
    partition = Partition(str(tmp_path))
    history(partition)
    partition.compacted.remove()
    assert not os.path.exists(partition.folder)
    partition.compacted.remove()


def test_a_seal_with_too_few_key_rows_is_refused_and_leaves_no_file(tmp_path):
    partition = Partition(str(tmp_path))
    partition.append([b"k%03d" % i for i in range(20)], [b"v"] * 20)
    hi, word = partition.sorted_rows(0, 19)
    with pytest.raises(Invalid):
        partition.compacted.seal(0, 20, [(hi, word)], bytes=1, max_append_ms=0)
    assert partition.compacted.manifest.dirty == ()
    assert os.listdir(partition.folder) == []


def test_a_key_index_is_the_same_in_whatever_portions_it_comes(tmp_path):
    partition = Partition(str(tmp_path))
    n = 10_000  # two blocks and a part of one
    partition.append([b"k%05d" % i for i in range(n)], [None if i % 3 else b"v" for i in range(n)])
    hi, word = partition.sorted_rows(0, n)
    for cuts in ([0, n], [0, 1, 4096, 4097, n], [0, 4095, 4095, 8192, n], list(range(0, n + 1, 500))):
        written = []
        writer = KeyIndexWriter(written.append)
        for start, end in itertools.pairwise(cuts):
            writer.add(hi[start:end], word[start:end])
        tables = writer.finish()
        assert [len(block) for block in written] == [65_536, 65_536, 16 * (n - 8192)]
        both = [np.frombuffer(block, np.uint64).reshape(2, -1) for block in written]
        assert np.array_equal(np.concatenate(both, axis=1), np.stack((hi, word)))
        assert (writer.rows, writer.tombstones) == (n, np.count_nonzero(word & np.uint64(1)))
        assert tables[:24] == hi[::4096].tobytes()

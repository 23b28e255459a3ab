"""The rules of compaction, one by one."""

import os

import numpy as np
import pytest

from firn.batch import Flag
from firn_node.compaction import Throttle
from firn_node.compaction.decide import pool_rows
from firn_node.compaction.keyindex import BlockCache
from support.compaction_kit import MemoryLog, Now, Partition, file_batches, fingerprint_of, run


@pytest.fixture
def partition(tmp_path):
    made = Partition(str(tmp_path))
    yield made
    made.check()
    made.open()
    made.check()


def test_a_superseded_row_and_its_key_index_row_are_gone_after_a_forced_compaction(partition):
    partition.append([b"a", b"b", b"a"], [b"1", b"2", b"3"])
    partition.compact(force=True)
    assert [(r.key, r.value, r.offset) for r in partition.served()] == [(b"b", b"2", 1), (b"a", b"3", 2)]
    (segment,) = partition.compacted.manifest.segments
    assert (segment.rows, segment.masked) == (2, 0)


def test_a_tombstone_is_served_until_its_time_counted_from_the_first_covering_is_over(partition):
    partition.append([b"a", b"b"], [b"1", b"2"])
    partition.append([b"a"], [None])
    partition.now.ms += 10_000  # age before it is covered does not count
    partition.compact(retention=1_000)
    assert [r.value for r in partition.served()] == [b"2", None]
    partition.append([b"c"], [b"3"])
    partition.now.ms += 999
    partition.compact(retention=1_000, force=True)  # rewritten, merged, and not made younger
    assert [r.value for r in partition.served()] == [b"2", None, b"3"]
    assert partition.compacted.manifest.tombstone_floor == 0
    partition.now.ms += 1
    result = partition.compact(retention=1_000)
    assert [r.value for r in partition.served()] == [b"2", b"3"]
    assert partition.compacted.manifest.tombstone_floor == 3
    assert result.tombstones_dropped == 1
    assert partition.compacted.stats().next_tombstone_ms is None


def test_without_delete_retention_the_compaction_that_covers_a_tombstone_masks_it(partition):
    partition.append([b"a", b"a", b"b"], [b"1", None, b"2"])
    partition.compact(retention=0)
    assert [r.key for r in partition.served()] == [b"b"]
    assert partition.compacted.manifest.tombstone_floor == 2


def grown(partition, *, rows=400, size=100):
    """One clean segment with ``rows`` keys."""
    partition.append([b"k%04d" % i for i in range(rows)], [bytes([i & 255]) * size for i in range(rows)])
    partition.compact()


def test_a_masked_tombstone_keeps_its_row_while_an_older_segment_holds_its_key(partition):
    grown(partition)
    partition.append([b"k0001", b"x"], [None, b"1"])
    partition.compact(retention=0, min_dead_ratio=0.5)
    old, new = partition.compacted.manifest.segments
    assert (old.rows, old.masked) == (400, 1)
    assert (new.rows, new.masked) == (
        2,
        1,
    )  # masked and still there: it holds k0001 down should the mask be lost
    partition.check()
    partition.open()
    for name in (old.mask, new.mask):
        partition.disk.unlink(os.path.join(partition.folder, name))
    partition.compacted.manifest  # noqa: B018 - opened already: the masks are read when first needed
    assert b"k0001" not in {r.key for r in partition.served()}
    partition.compact(force=True)
    assert [(s.rows, s.masked) for s in partition.compacted.manifest.segments] == [(400, 0)]


def test_a_tombstone_without_older_rows_leaves_with_its_mask(partition):
    partition.append([b"a", b"b"], [None, b"1"])
    partition.compact(retention=0)
    (segment,) = partition.compacted.manifest.segments
    assert (segment.rows, segment.masked) == (1, 0)


@pytest.mark.parametrize(("overwritten", "rewritten"), [(99, False), (100, True)])
def test_a_clean_segment_is_rewritten_when_a_quarter_of_it_is_masked(partition, overwritten, rewritten):
    grown(partition)
    before = partition.compacted.manifest.segments[0]
    partition.append([b"k%04d" % i for i in range(overwritten)], [b""] * overwritten)
    partition.compact(min_dead_ratio=0.25)
    first = partition.compacted.manifest.segments[0]
    assert (first.name != before.name) == rewritten
    assert first.masked == (0 if rewritten else overwritten)


def test_a_masked_row_is_off_the_disk_once_it_is_older_than_reclaim_age(partition):
    grown(partition)
    partition.append([b"k0001"], [b"new"])
    partition.compact(reclaim_age=1_000)
    assert partition.compacted.manifest.masked == 1
    assert partition.compacted.stats().oldest_masked_ms == partition.now.ms
    partition.now.ms += 999
    partition.append([b"k0002"], [b"new"])
    partition.compact(reclaim_age=1_000)
    assert partition.compacted.manifest.masked == 2
    partition.now.ms += 1
    partition.compact(reclaim_age=1_000)
    assert partition.compacted.manifest.masked == 0


def test_small_neighbours_are_merged_up_to_the_segment_size(partition):
    for i in range(40):
        partition.append([b"k%04d-%d" % (j, i) for j in range(20)], [b"v" * 50] * 20)
        partition.compact(segment_bytes=20_000)
    sizes = [s.bytes for s in partition.compacted.manifest.segments]
    assert max(sizes) <= 20_000
    assert len(sizes) <= 10
    assert sum(sizes) > 50_000


def test_a_batch_of_16_kib_that_loses_nothing_is_copied_byte_for_byte_and_others_are_joined(partition):
    partition.append([b"big-%d" % i for i in range(20)], [b"v" * 1000] * 20, epoch=3)
    for i in range(10):
        partition.append([b"small-%d" % i, b"s"], [b"x" * 10, b"y"], epoch=i + 1)
    partition.compact()
    big, small = file_batches(partition)
    source = partition.entry_list[0]
    assert bytes(big.data) == bytes(partition.log.data[: source.size])
    assert small.header.flags & Flag.REBUILT
    assert (small.header.records, small.header.producer_id, small.header.epoch) == (11, 0, 10)
    assert small.header.is_sparse


def test_joined_batches_have_about_256_kib(partition):
    for i in range(100):
        partition.append([b"%d-%d" % (i, j) for j in range(10)], [b"v" * 1000] * 10)
    partition.compact(segment_bytes=64 << 20)
    sizes = [b.header.size for b in file_batches(partition)]
    assert len(sizes) == 4
    assert all(200_000 < s < 300_000 for s in sizes[:-1])


def test_rows_above_upto_stay_dirty_in_a_sealed_segment_that_is_cut(partition):
    partition.append([b"a", b"b", b"a", b"c"], [b"1", b"2", b"3", b"4"])
    partition.seal()
    partition.compact(upto=2)
    m = partition.compacted.manifest
    assert (m.horizon, len(m.dirty)) == (2, 1)
    hi, lo = fingerprint_of([b"a"])
    assert list(partition.compacted.dirty_newest(hi[0], lo[0])) == [2]  # the row at 0 is below the horizon
    partition.compact()
    assert partition.compacted.manifest.dirty == ()


def test_a_decision_in_64_kib_takes_many_rounds_and_finds_the_same(tmp_path):
    rng = np.random.default_rng(5)
    ids = rng.integers(0, 60_000, 200_000).tolist()
    results = []
    for number, memory in enumerate((64 << 10, 64 << 20)):
        partition = Partition(str(tmp_path), number=number)
        for at in range(0, len(ids), 10_000):
            keys = [b"k%d" % i for i in ids[at : at + 10_000]]
            partition.append(keys, [None if i % 9 == 0 else b"%d" % at for i in range(len(keys))])
            if at % 50_000 == 0:
                partition.seal()
        result = partition.compact(memory=memory, segment_bytes=1 << 20)
        results.append((result.rounds, [r[0] for r in partition.served()]))
        assert results[-1][1] == [r.offset for r in partition.expected()]
    assert results[0][0] > 50
    assert results[1][0] == 1
    assert results[0][1] == results[1][1]
    assert pool_rows(64 << 10, 200_000, 200_000) * 36 <= 16 << 10


def test_one_hot_key_takes_one_place_in_the_pool(tmp_path):
    partition = Partition(str(tmp_path))
    for _ in range(30):
        partition.append([b"hot"] * 10_000, [b"v"] * 10_000)
    partition.append([b"cold"], [b"v"])
    partition.seal()
    result = partition.compact(memory=64 << 10)
    assert [r.offset for r in partition.served()] == [299_999, 300_000]
    assert result.rounds < 20
    assert len(partition.log.reads) <= 2  # batches of which nothing survives are not read


def test_two_keys_with_one_fingerprint_are_told_apart_by_their_bytes(tmp_path):
    partition = Partition(str(tmp_path))
    same = (np.full(1, 77, np.uint64), np.full(1, 5, np.uint32))
    partition.append([b"Aa"], [b"1"], fingerprints=same)
    partition.compact()
    assert partition.compacted.newest(b"Aa", 77, 5).value == b"1"
    assert partition.compacted.newest(b"BB", 77, 5) is None
    # Two rows of one fingerprint in one generation: older segment Aa, newer BB, nothing decided in between.
    other = Partition(str(tmp_path), number=1)
    forged = (np.full(2, 77, np.uint64), np.array([5, 6], np.uint32))
    other.append([b"Aa", b"BB"], [b"1", b"2"], fingerprints=forged)
    other.compact()
    assert other.compacted.newest(b"Aa", 77, 5).value == b"1"
    assert other.compacted.newest(b"BB", 77, 6).value == b"2"
    assert other.compacted.newest(b"BB", 77, 5) is None


def test_a_sweep_of_200_interleaved_partitions_gives_what_each_alone_gives(tmp_path):
    views = []
    for name in ("together", "alone"):
        log, now = MemoryLog(), Now()
        parts = [Partition(str(tmp_path / name), number=i, log=log, now=now) for i in range(200)]
        for step in range(6):
            for p in parts:
                keys = [b"k%d" % ((step * 7 + j * p.number) % 11) for j in range(5)]
                p.append(keys, [None if j == step else b"%d" % step for j in range(5)])
        groups = [parts] if name == "together" else [[p] for p in parts]
        for group in groups:
            jobs = [p.job() for p in group]
            log.reads.clear()
            run(jobs, log, now)
            assert {j.result.state for j in jobs} == {"done"}
            if name == "together":
                assert len(log.reads) == 1  # 1,200 batches, read in windows in order
            for p, job in zip(group, jobs, strict=True):
                p.follow(job)
        for p in parts[::20]:
            p.check()
        views.append([p.served() for p in parts])
        assert len(parts[0].cache) <= 16
    assert views[0] == views[1]


def test_a_job_that_fails_leaves_the_others_done_and_its_own_state_as_it_was(tmp_path):
    log, now = MemoryLog(), Now()
    parts = [Partition(str(tmp_path), number=i, log=log, now=now) for i in range(3)]
    for p in parts:
        p.append([b"a", b"b"], [b"1", b"2"])
    bad = parts[1].entry_list[0]
    log.data[bad.position + bad.size - 8] ^= 1
    jobs = [p.job() for p in parts]
    run(jobs, log, now)
    assert [j.result.state for j in jobs] == ["done", "failed", "done"]
    assert "values CRC" in jobs[1].result.reason
    assert f"byte {bad.position}" in jobs[1].result.reason
    for p, job in zip(parts, jobs, strict=True):
        if job.result.state == "done":
            p.follow(job)
        p.check()
    assert parts[1].disk.list(parts[1].folder) == []
    log.data[bad.position + bad.size - 8] ^= 1
    parts[1].compact()
    parts[1].check()


def test_a_cancelled_compaction_leaves_the_old_state_and_no_files(tmp_path):
    partition = Partition(str(tmp_path))
    for i in range(30):
        partition.append([b"k%d" % i], [b"v" * 30_000])
    partition.seal()
    asked = 0

    def is_cancelled():
        nonlocal asked
        asked += 1
        return asked > 12

    job = partition.job()
    run([job], partition.log, partition.now, is_cancelled=is_cancelled)
    assert job.result.state == "cancelled"
    assert partition.compacted.manifest.horizon == 0
    partition.check()
    partition.compact()
    partition.check()


def test_the_throttle_bounds_bytes_per_second():
    class Clock:
        at = 0.0

        def monotonic(self):
            return self.at

        def wall_ms(self):
            return 0

        def sleep(self, seconds):
            self.at += seconds

    clock = Clock()
    throttle = Throttle(1_000_000, clock=clock, sleep=clock.sleep)
    for _ in range(100):
        throttle.take(100_000)
    assert 9.7 <= clock.at <= 10.1
    throttle.bytes_per_second = 0
    throttle.take(1 << 40)
    assert clock.at <= 10.1


def test_a_block_cache_with_a_lower_limit_forgets_what_was_used_longest_ago():
    cache = BlockCache(100)
    for name in ("a", "b", "c"):
        cache.get((name,), lambda name=name: (name, 20))
    cache.get(("a",), lambda: pytest.fail("it was there"))
    cache.limit(40)
    assert [cache.get((name,), lambda: ("anew", 1)) for name in ("a", "c", "b")] == ["a", "c", "anew"]

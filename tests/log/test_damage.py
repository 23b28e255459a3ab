"""Damage below the durable end is named; a torn tail above it is cut, whatever follows it."""

import pytest
from firn_sim.batches import batch, sized
from firn_sim.disk import SimDisk

from firn.batch import iterate
from firn.errors import BadOffset, Corrupt, Invalid, MalformedBatch, OffsetExpired
from firn_node.filecache import FileCache
from firn_node.log.commitlog import CommitLog
from firn_node.log.headpage import HEAD_BYTES, SLOT_BYTES, SLOT_STRIDE
from firn_node.log.recovery import check_batches
from firn_node.log.segment import keys_path, segment_path, summary_path

FOLDER = "/data/log"


def open_log(disk: SimDisk, verify_from: int = 0, create_at: int = 0) -> CommitLog:
    cache = FileCache(disk, 16)
    return CommitLog.open(
        disk, cache, FOLDER, segment_bytes=4096, verify_from=verify_from, create_at=create_at
    )


@pytest.fixture
def disk() -> SimDisk:
    return SimDisk(5)


def filled(disk: SimDisk, *, close: bool = True) -> list[int]:
    """Eight batches over three segments, each group synced; their positions."""
    log = open_log(disk)
    positions = []
    for serial in range(8):
        positions += log.append([sized(1_200, serial)])
        log.sync()
    if close:
        log.close()
    return positions


def verify_all(data: bytes) -> None:
    """The check in plain Python, against which the kernel is held."""
    for found in iterate(data):
        found.verify()


def file_byte(disk: SimDisk, position: int) -> tuple[str, int]:
    start = max(int(n[:20]) for n in disk.list(FOLDER) if n.endswith(".log") and int(n[:20]) <= position)
    return segment_path(FOLDER, start), HEAD_BYTES + position - start


@pytest.mark.parametrize("is_clean", [True, False], ids=["after a clean stop", "after a crash"])
def test_a_flipped_bit_below_the_durable_end_is_named_with_file_and_position(is_clean: bool) -> None:
    for byte in (0, 3, 9, 13, 17, 40, 103, 110, 400, 1_000):
        disk = SimDisk(byte)
        positions = filled(disk, close=is_clean)
        if not is_clean:
            disk.kill()
        at = positions[4]
        path, place = file_byte(disk, at + byte)
        disk.flip(path, place, bit=2)
        with pytest.raises(
            Corrupt, match=f"{path} at position {at}: .*(expected|not a sum|does not know)"
        ) as raised:
            open_log(disk)
        assert raised.value.details == {"file": path, "position": at}


def test_damage_below_verify_from_is_the_readers_to_find(disk: SimDisk) -> None:
    positions = filled(disk)
    disk.flip(*file_byte(disk, positions[1] + 500))
    assert open_log(disk, verify_from=positions[2]).written_end > positions[7]


def test_a_clean_stop_is_opened_without_reading_a_batch_or_writing_a_byte(disk: SimDisk) -> None:
    positions = filled(disk)
    end = positions[-1] + len(sized(1_200, 7))
    before = len(disk.operations)
    reads: list[str] = []
    disk.delay = lambda kind, path: reads.append(path) if kind == "pread" else None
    log = open_log(disk, verify_from=end)
    segments = [p for p in reads if p.endswith(".log")]
    assert len(segments) == len(log.extents())  # one head page each
    assert len(disk.operations) == before
    assert (log.written_end, log.durable_end, log.last_append_ms) == (end, end, 2_000)


@pytest.mark.parametrize("tail", [b"\0" * 5_000, b"\xff" * 64, sized(900, 99)[:-8], b"FIRN"], ids=len)
def test_a_torn_tail_is_cut_whatever_follows(disk: SimDisk, tail: bytes) -> None:
    positions = filled(disk, close=False)
    disk.kill()
    path, place = file_byte(disk, positions[-1])
    whole = disk.content(path)
    # A whole batch after the tear must not come back: it was never acknowledged.
    disk.put(path, whole + tail + sized(500, 77))
    log = open_log(disk)
    assert log.written_end == positions[-1] + len(sized(1_200, 7))
    assert len(disk.content(path)) == HEAD_BYTES + log.written_end - log.extents()[-1][0]
    assert place < len(whole)


def test_a_bad_batch_in_the_last_group_is_a_torn_tail_and_the_next_segment_goes_too(disk: SimDisk) -> None:
    log = open_log(disk)
    log.append([sized(1_000, 1)])
    log.sync()
    first, second, third = log.append([sized(1_000, 2), sized(1_000, 3), sized(3_000, 4)])
    disk.kill()
    assert len([n for n in disk.list(FOLDER) if n.endswith(".log")]) == 2
    disk.flip(*file_byte(disk, second + 700))
    log = open_log(disk)
    assert log.written_end == second
    assert first < second < third
    assert [n for n in disk.list(FOLDER) if n.endswith(".log")] == [f"{0:020d}.log"]


def test_bytes_that_the_checkpoint_vouches_for_are_never_cut(disk: SimDisk) -> None:
    log = open_log(disk)
    log.append([sized(1_000, 1)])
    log.append([sized(1_000, 2)])
    end = log.sync()
    disk.kill()
    path, place = file_byte(disk, end - 1)
    disk.put(path, disk.content(path)[: place - 100])
    with pytest.raises(Corrupt, match=f"{path} at position .*expected"):
        open_log(disk, verify_from=end)


def test_a_log_that_vanished_below_the_checkpoint_is_damage_not_a_new_log(disk: SimDisk) -> None:
    with pytest.raises(
        Corrupt, match="expected durable batches up to position 800, found the end of the log"
    ):
        open_log(disk, verify_from=800)


def test_a_missing_middle_segment_is_named(disk: SimDisk) -> None:
    filled(disk)
    starts = [int(n[:20]) for n in disk.list(FOLDER) if n.endswith(".log")]
    disk.unlink(segment_path(FOLDER, starts[1]))
    with pytest.raises(Corrupt, match=f"{starts[0]:020d}.log at position {starts[1]}: expected"):
        open_log(disk, verify_from=starts[2])


def test_a_missing_first_segment_is_named(disk: SimDisk) -> None:
    filled(disk)
    disk.unlink(segment_path(FOLDER, 0))
    with pytest.raises(Corrupt, match=f"{0:020d}.log: expected the first segment of the log"):
        open_log(disk)


def test_one_damaged_slot_of_the_head_page_costs_nothing(disk: SimDisk) -> None:
    for slot in (0, SLOT_STRIDE):
        for byte in (0, 20, SLOT_BYTES - 1):
            disk = SimDisk(byte)
            positions = filled(disk)
            path, _ = file_byte(disk, positions[-1])
            disk.flip(path, slot + byte)
            assert open_log(disk).written_end == positions[-1] + len(sized(1_200, 7))


def test_a_marker_beside_a_damaged_slot_is_not_believed(disk: SimDisk) -> None:
    log = open_log(disk)
    log.append([sized(500, 1)])
    log.close()
    log = open_log(disk)
    log.append([sized(500, 2)])
    end = log.sync()
    disk.kill()
    path = segment_path(FOLDER, 0)
    slots = [int.from_bytes(disk.content(path)[at + 8 : at + 16], "little") for at in (0, SLOT_STRIDE)]
    disk.flip(path, SLOT_STRIDE * slots.index(max(slots)) + 30)
    assert open_log(disk).written_end == end


def test_a_head_page_with_both_slots_damaged_is_named(disk: SimDisk) -> None:
    positions = filled(disk)
    path, _ = file_byte(disk, positions[-1])
    disk.flip(path, 10)
    disk.flip(path, SLOT_STRIDE + 10)
    with pytest.raises(Corrupt, match=f"{path} at byte 0: expected a head page"):
        open_log(disk)


@pytest.mark.parametrize("damage", ["missing", "flipped", "cut", "other"])
def test_a_lost_summary_is_counted_again(disk: SimDisk, damage: str) -> None:
    log = open_log(disk)
    for serial in range(6):
        log.append([batch(topic_id=8 + serial % 2 * 8, value=bytes(1_000), append_ms=3_000 + serial)])
    log.sync()
    wanted = log.segments()
    log.close()
    path = summary_path(FOLDER, 0)
    data = disk.content(path)
    if damage == "missing":
        disk.unlink(path)
    elif damage == "flipped":
        disk.flip(path, 40)
    else:
        other = disk.content(summary_path(FOLDER, wanted[1].start))
        disk.put(path, data[:-1] if damage == "cut" else other)
    found = open_log(disk).segments()
    assert [(i.start, i.end, i.sealed, i.topics) for i in found] == [
        (i.start, i.end, i.sealed, i.topics) for i in wanted
    ]
    assert found[0].topics[8].newest_append_ms == 3_002
    assert disk.content(path) == data


def test_a_truncated_segment_never_meets_its_old_summary_or_keys(disk: SimDisk) -> None:
    log = open_log(disk)
    first, second, _ = log.append([sized(1_000, 1), sized(1_000, 2), sized(3_000, 3)])
    log.sync()
    disk.put(keys_path(FOLDER, 0), b"old")
    log.truncate(second)
    log.append([sized(1_000, 4, topic_id=16), sized(3_000, 5)])
    log.sync()
    assert not disk.exists(keys_path(FOLDER, 0))
    assert [set(i.topics) for i in log.segments()] == [{8, 16}, {8}]
    disk.crash()
    assert [set(i.topics) for i in open_log(disk).segments()] == [{8, 16}, {8}]
    assert first == 0


def test_a_hold_keeps_its_segment_and_all_later_ones(disk: SimDisk) -> None:
    positions = filled(disk)
    log = open_log(disk)
    starts = [start for start, _ in log.extents()]
    assert len(starts) == 3
    hold = log.hold(positions[1])
    assert log.release(log.written_end) == 0
    hold.move(starts[1] + 8)
    assert log.release(log.written_end) == starts[1]
    assert log.read(starts[1], 8) == sized(1_200, positions.index(starts[1]))[:8]
    with pytest.raises(OffsetExpired):
        log.read(0, 8)
    hold.release()
    hold.release()
    assert log.release(starts[1] + 1) == starts[1]
    assert log.release(log.written_end) == starts[2]
    assert [n for n in disk.list(FOLDER) if int(n[:20]) < starts[2]] == []


def test_a_leased_range_of_a_released_segment_stays_readable_until_it_is_given_back(disk: SimDisk) -> None:
    filled(disk)
    log = open_log(disk)
    held = log.range(0, 104)
    log.release(log.written_end)
    assert held.read() == sized(1_200, 0)[:104]
    assert disk.exists(segment_path(FOLDER, 0))
    held.lease.release()
    assert not disk.exists(segment_path(FOLDER, 0))


def test_a_released_segment_that_a_crash_left_behind_is_removed_at_the_next_start(disk: SimDisk) -> None:
    filled(disk)
    log = open_log(disk)
    held = log.range(0, 8)
    start = log.release(log.written_end)
    disk.kill()
    assert disk.exists(segment_path(FOLDER, 0))
    log = open_log(disk)
    assert log.start == start
    assert not disk.exists(segment_path(FOLDER, 0))
    assert held.size == 8


def test_reads_are_refused_beyond_the_written_end_and_within_a_batch_nothing_is_truncated(
    disk: SimDisk,
) -> None:
    positions = filled(disk)
    log = open_log(disk)
    with pytest.raises(BadOffset):
        log.read(log.written_end - 8, 16)
    with pytest.raises(Invalid, match="cannot truncate"):
        log.truncate(positions[3] + 8)
    with pytest.raises(Invalid, match="beyond the end"):
        log.truncate(log.written_end + 8)
    whole = log.read(0, log.written_end)
    pieces = log.ranges(0, log.written_end)
    assert len(pieces) == 3
    assert b"".join(p.read() for p in pieces) == whole
    assert len(whole) == log.written_end
    for piece in pieces:
        piece.lease.release()


def test_a_standby_begins_its_log_where_its_masters_begins(disk: SimDisk) -> None:
    log = open_log(disk, create_at=1 << 20, verify_from=1 << 20)
    assert log.append([sized(500, 1)]) == [1 << 20]
    log.close()
    assert open_log(disk, verify_from=1 << 20).start == 1 << 20


def test_a_batch_longer_than_a_segment_gets_one_of_its_own(disk: SimDisk) -> None:
    log = open_log(disk)
    sizes = [500, 9_000, 500]
    positions = log.append([sized(s, i) for i, s in enumerate(sizes)])
    assert [start for start, _ in log.extents()] == positions
    log.sync()
    disk.crash()
    assert [data for _, data in open_log(disk).scan(0, log.written_end, chunk=600)] == [
        sized(s, i) for i, s in enumerate(sizes)
    ]


@pytest.mark.parametrize("codec", [0, 1, 2])
def test_no_flipped_bit_passes_the_check_and_its_sentence_names_both_values(codec: int) -> None:
    batches = [batch([b"a", b"bb"], value=bytes(40), codec=codec), batch([b"c"], value=None)]
    data = b"".join(batches)
    assert check_batches(data) == (len(data), None)
    assert check_batches(data[:-8]) == (len(batches[0]), None)
    for at in range(len(batches[0])):
        broken = bytearray(data)
        broken[at] ^= 1 << at % 8
        good, fault = check_batches(bytes(broken))
        with pytest.raises(MalformedBatch) as raised:
            verify_all(bytes(broken))
        assert (good, fault) == (0, raised.value.message)


def test_a_truncation_that_a_crash_cut_short_leaves_no_summary_of_the_removed_bytes(disk: SimDisk) -> None:
    log = open_log(disk)
    _, second, _ = log.append([sized(1_000, 1), sized(1_000, 2), sized(3_000, 3)])
    log.sync()
    assert disk.exists(summary_path(FOLDER, 0))
    disk.fail(1, kinds={"unlink"})  # right after the marker
    with pytest.raises(OSError, match="Input/output"):
        log.truncate(second)
    disk.kill()
    log = open_log(disk)
    assert log.append([sized(1_000, 2, topic_id=16), sized(3_000, 5)])[0] == second
    disk.kill()
    assert [set(i.topics) for i in open_log(disk).segments()] == [{8, 16}, {8}]

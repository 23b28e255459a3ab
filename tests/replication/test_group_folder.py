"""What a data folder remembers of its group: the group file, the epoch history, and what a start makes of them.

``python tests/replication/test_group_folder.py NEW`` writes the golden files that are missing.
"""

import contextlib
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from firn_sim.batches import batch, sized
from firn_sim.disk import SimDisk

from firn.batch import Identity, columns_of, encode, header_crc
from firn.errors import Corrupt, Invalid
from firn.topicspec import DurabilitySpec, TopicSpec
from firn.types import TOPICS_TOPIC_ID, Epoch, Position
from firn_node.clock import RealRandomness
from firn_node.disk import RealDisk
from firn_node.dump import read_any
from firn_node.engine.api import TopicInfo
from firn_node.engine.catalogue import topic_value
from firn_node.engine.identity import load_identity
from firn_node.engine.membership import makes_interval
from firn_node.filecache import FileCache
from firn_node.log import CommitLog
from firn_node.offline.audit import audit_folder
from firn_node.replication.doors import epochfile, groupfile
from firn_node.replication.doors.epochfile import EpochFile, read_on
from firn_node.replication.doors.groupfile import GroupFile, Stored
from firn_node.replication.doors.startup import Folder, machine_boot_id, open_folder
from firn_node.replication.epochstart import epoch_start_batch
from firn_node.replication.messages import EpochStart, History
from firn_node.replication.record import GroupId, LogId
from firn_node.replication.rules import RULES
from firn_node.replication.state import Meta

GOLDEN = Path(__file__).parents[1] / "format" / "golden"
GROUP = GroupId("orders-0")
META = Meta(Epoch(7), 42, True, False, "5f0c1d7e-boot")
NEXT = replace(META, epoch=Epoch(8), is_unclean=True)


def history(*pairs: tuple[int, int]) -> History:
    return tuple(EpochStart(Epoch(epoch), Position(start)) for epoch, start in pairs)


GOLDENS: dict[str, Callable[[], bytes]] = {
    "group-file.bin": lambda: groupfile.encode(Stored(GROUP, META, True)),
    "group-file-starts.bin": lambda: groupfile.encode(Stored(GROUP, replace(META, starts=3), False)),
    "epoch-file.bin": lambda: epochfile.encode(history((1, 4096), (3, 70_000), (4, 9_000_000_000)), Position(1 << 40)),
}  # fmt: skip


@pytest.mark.parametrize("name", GOLDENS)
def test_the_bytes_of_the_folder_s_group_files_stay_as_they_are(name: str) -> None:
    assert GOLDENS[name]() == (GOLDEN / name).read_bytes()


def test_golden_group_files_read_as_what_was_written() -> None:
    assert groupfile.parse((GOLDEN / "group-file.bin").read_bytes(), "group") == Stored(GROUP, META, True)
    counted = groupfile.parse((GOLDEN / "group-file-starts.bin").read_bytes(), "group")
    assert counted == Stored(GROUP, replace(META, starts=3), False)
    found = epochfile.parse((GOLDEN / "epoch-file.bin").read_bytes())
    assert found == (history((1, 4096), (3, 70_000), (4, 9_000_000_000)), 1 << 40)


def test_damage_to_any_byte_of_the_group_file_is_named() -> None:
    data = groupfile.encode(Stored(GROUP, META, False))
    for at in range(len(data)):
        broken = bytearray(data)
        broken[at] ^= 1
        with pytest.raises(Corrupt, match="/d/group"):
            groupfile.parse(bytes(broken), "/d/group")
        with pytest.raises(Corrupt, match="/d/group"):
            groupfile.parse(data[:at], "/d/group")


def test_a_crash_at_any_step_of_storing_leaves_the_old_or_the_new_meta() -> None:
    def stored(disk: SimDisk) -> Meta | None:
        found = GroupFile(disk, "/d", GROUP).load()
        return found.meta if found is not None else None

    probe = SimDisk(0)
    probe.make_folder("/d")
    GroupFile(probe, "/d", GROUP).store(META)
    before = len(probe.operations)
    GroupFile(probe, "/d", GROUP).store(NEXT)
    steps = len(probe.operations) - before
    assert steps >= 4
    seen = set()
    for step in range(1, steps + 1):
        for seed in range(8):
            disk = SimDisk(seed)
            disk.make_folder("/d")
            file = GroupFile(disk, "/d", GROUP)
            file.store(META)
            disk.fail(step)
            with pytest.raises(OSError, match="Input/output"):
                file.store(NEXT)
            disk.crash()
            seen.add(stored(disk) == NEXT)
            assert stored(disk) in (META, NEXT)
            file = GroupFile(disk, "/d", GROUP)
            file.store(NEXT)
            disk.crash()
            assert stored(disk) == NEXT
    assert seen == {True, False}


def test_the_mark_of_a_clean_stop_is_seen_once_whatever_happens_after_it() -> None:
    disk = SimDisk(0)
    disk.make_folder("/d")
    GroupFile(disk, "/d", GROUP).store(META, was_shut_down=True)
    first = GroupFile(disk, "/d", GROUP).load()
    assert first == Stored(GROUP, META, True)
    disk.crash()
    assert GroupFile(disk, "/d", GROUP).load() == Stored(GROUP, META, False)


def test_another_group_s_folder_is_refused_by_name() -> None:
    disk = SimDisk(0)
    disk.make_folder("/d")
    GroupFile(disk, "/d", GROUP).store(META)
    with pytest.raises(Invalid, match="belongs to group orders-0, not to orders-1"):
        GroupFile(disk, "/d", GroupId("orders-1")).load()


def test_dump_and_verify_read_the_group_s_files_and_find_damage(tmp_path: Path) -> None:
    disk = RealDisk(tmp_path)
    log = CommitLog.open(disk, FileCache(disk, 4), f"{tmp_path}/log", segment_bytes=4096, verify_from=0)
    log.close()
    load_identity(disk, str(tmp_path), RealRandomness())
    GroupFile(disk, str(tmp_path), GROUP).store(META)
    EpochFile(disk, str(tmp_path)).store(history((1, 4096), (3, 70_000)), Position(80_000))
    facts = read_any(disk, f"{tmp_path}/group").facts
    assert (facts["group_id"], facts["epoch"], facts["record_version"]) == (GROUP, 7, 42)
    assert read_any(disk, f"{tmp_path}/epochs").facts == {"upto": 80_000, "epochs": {"1": 4096, "3": 70_000}}
    assert audit_folder(str(tmp_path)).damages == []
    for name in ("group", "epochs"):
        path = tmp_path / name
        path.write_bytes(path.read_bytes()[:-1] + b"x")
    found = audit_folder(str(tmp_path))
    assert [damage.file for damage in found.damages] == [f"{tmp_path}/group"]
    assert any("epochs off all batch headers" in note for note in found.notes)


# The epoch history.


def open_log(disk: SimDisk) -> CommitLog:
    return CommitLog.open(
        disk, FileCache(disk, 8), "/d/log", segment_bytes=2048, verify_from=0, create_at=4096
    )


def start_of(epoch: int) -> bytes:
    return epoch_start_batch(Epoch(epoch), group_id=GROUP, log_id=LogId("x"), now_ms=1)


def of_epoch(epoch: int, size: int, serial: int) -> bytes:
    """A batch of about ``size`` bytes that was appended in an epoch."""
    data = bytearray(sized(size, serial))
    data[44:48] = epoch.to_bytes(4, "little")
    data[8:12] = header_crc(data[:104]).to_bytes(4, "little")
    return bytes(data)


def write_epochs(log: CommitLog, *epochs: int) -> History:
    """Some batches in each epoch; where they begin."""
    found = []
    for epoch in epochs:
        found.append((epoch, log.written_end))
        log.append([start_of(epoch), *(of_epoch(epoch, 300 + 50 * i, i) for i in range(8))])
    log.sync()
    return history(*found)


def test_epochs_are_read_off_the_headers_whatever_was_remembered() -> None:
    disk = SimDisk(1)
    log = open_log(disk)
    expected = write_epochs(log, 1, 2, 5, 9)
    assert read_on(log, (), Position(0)) == expected
    positions = [p for p, data in log.scan(log.start, log.written_end, chunk=700)]
    for upto in (4096, *positions, log.written_end):
        file = EpochFile(disk, "/d")
        file.store(expected, Position(upto))
        again = EpochFile(disk, "/d")
        assert again.load(log) == expected
        assert again.upto == upto


def test_epochs_of_removed_segments_are_remembered_by_the_file_and_nothing_else() -> None:
    disk = SimDisk(1)
    log = open_log(disk)
    expected = write_epochs(log, 1, 2, 5, 9)
    EpochFile(disk, "/d").store(expected, Position(log.written_end))
    log.release(expected[-1].start)
    assert log.start > expected[1].start
    assert EpochFile(disk, "/d").load(log) == expected
    disk.flip("/d/epochs", 9)
    assert EpochFile(disk, "/d").load(log)[-1] == expected[-1]
    assert EpochFile(disk, "/d").load(log)[0].start == log.start


def test_a_history_that_was_cut_does_not_come_back_after_other_epochs_took_its_place() -> None:
    disk = SimDisk(1)
    log = open_log(disk)
    expected = write_epochs(log, 1, 2, 5)
    file = EpochFile(disk, "/d")
    file.store(expected, Position(log.written_end))
    cut = expected[2].start
    file.cut(expected, cut)
    disk.crash()  # between the file and the log
    log = open_log(disk)
    assert EpochFile(disk, "/d").load(log) == expected
    log.truncate(cut)
    assert write_epochs(log, 7) == history((7, cut))
    disk.crash()
    assert EpochFile(disk, "/d").load(open_log(disk)) == (*expected[:2], *history((7, cut)))


def test_a_log_that_ends_before_what_was_durable_once_is_damage() -> None:
    disk = SimDisk(1)
    log = open_log(disk)
    known = write_epochs(log, 1)
    EpochFile(disk, "/d").store(known, Position(log.written_end + 8))
    with pytest.raises(Corrupt, match="was durable up to position"):
        EpochFile(disk, "/d").load(log)


def test_the_newest_epochs_are_kept_when_there_are_too_many() -> None:
    disk = SimDisk(1)
    log = open_log(disk)
    known = write_epochs(log, 9_000)
    many = (*history(*((epoch, epoch - 1) for epoch in range(1, 4097))), *known)
    EpochFile(disk, "/d").store(many, Position(log.written_end))
    assert EpochFile(disk, "/d").load(log) == many[1:]


def test_epochs_that_go_back_are_damage() -> None:
    log = open_log(SimDisk(1))
    log.append([of_epoch(4, 300, 0), of_epoch(4, 300, 1), of_epoch(3, 300, 2)])
    with pytest.raises(Corrupt, match="epoch 3 after epoch 4"):
        read_on(log, (), Position(0))


# What a start is told.


def opened(disk: SimDisk, log: CommitLog, *, boot_id: str = "boot-1", has_interval: bool = False) -> Folder:
    return open_folder(
        disk, "/d", GROUP, log, boot_id=boot_id, committed=log.durable_end, has_interval=has_interval
    )


def made(flush: str) -> bytes:
    """The record that creates a topic."""
    value = topic_value(TopicInfo("orders", 9, TopicSpec(durability=DurabilitySpec(flush=flush))))
    identity = Identity(topic_id=TOPICS_TOPIC_ID, partition=0, epoch=1, append_timestamp=1)
    return encode(columns_of([b"orders"], [value], 1), identity)


def test_a_topic_of_flush_interval_that_the_checkpoint_does_not_know_is_found_in_the_log() -> None:
    log = open_log(SimDisk(1))
    log.append([of_epoch(1, 300, 0), made("sync")])
    assert not makes_interval(log, 0)
    checkpoint = log.written_end
    log.append([of_epoch(1, 300, 1), made("interval")])
    assert makes_interval(log, checkpoint)
    assert not makes_interval(log, log.written_end)


def test_a_new_folder_starts_with_nothing_and_proves_that_no_other_process_has_it() -> None:
    disk = SimDisk(1)
    startup = opened(disk, open_log(disk)).startup
    assert startup.meta == Meta()
    assert startup.log.is_empty
    assert (startup.log.start, startup.committed) == (4096, 0)
    assert startup.old_process_is_dead
    assert not startup.was_shut_down


def test_a_restart_finds_epochs_promises_and_whether_it_was_shut_down() -> None:
    disk = SimDisk(1)
    log = open_log(disk)
    folder = opened(disk, log)
    expected = write_epochs(log, 1, 2)
    folder.group_file.store(replace(META, boot_id="boot-1"), was_shut_down=True)
    startup = opened(disk, log).startup
    assert startup.meta == replace(META, boot_id="boot-1")
    assert startup.log.history == expected
    assert startup.was_shut_down
    assert startup.old_process_is_dead
    assert startup.committed == log.written_end
    assert not opened(disk, log).startup.was_shut_down


@pytest.mark.parametrize(("was_shut_down", "is_unclean"), [(True, False), (False, True)])
def test_after_another_boot_only_a_clean_stop_keeps_a_node_clean(
    was_shut_down: bool, is_unclean: bool
) -> None:
    disk = SimDisk(1)
    log = open_log(disk)
    folder = opened(disk, log)
    write_epochs(log, 1)
    folder.group_file.store(replace(META, boot_id="boot-1"), was_shut_down=was_shut_down)
    startup = opened(disk, log, boot_id="boot-2", has_interval=True).startup
    assert not startup.old_process_is_dead  # the volume may have moved, and its process lives elsewhere
    assert RULES.starts_unclean(startup) == is_unclean


def test_an_epoch_history_without_its_group_file_is_refused() -> None:
    disk = SimDisk(1)
    log = open_log(disk)
    EpochFile(disk, "/d").store(history((1, 4096)), Position(4096))
    with pytest.raises(Corrupt, match="/d/group: expected what this folder promised"):
        opened(disk, log)


def test_a_log_without_its_group_file_is_refused() -> None:
    disk = SimDisk(1)
    log = open_log(disk)
    log.append([batch()])
    with pytest.raises(Corrupt, match="/d/group: expected what this folder promised"):
        opened(disk, log)


def test_the_machine_tells_its_boot_id() -> None:
    assert len(machine_boot_id()) == 36
    assert machine_boot_id() == machine_boot_id()


if __name__ == "__main__" and sys.argv[1:] == ["NEW"]:
    for name, make in GOLDENS.items():
        with contextlib.suppress(FileExistsError), (GOLDEN / name).open("xb") as golden:
            golden.write(make())

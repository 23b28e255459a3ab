"""What the core is told when a process opens a data folder.

Order: 1. the folder is locked and the log is open and repaired (the engine's), 2. the group file is read and the
mark of a clean stop removed, 3. the epoch history is read.
"""

from dataclasses import dataclass
from pathlib import Path

from firn.errors import Corrupt
from firn.types import Position
from firn_node.disk import Disk
from firn_node.log import CommitLog
from firn_node.replication.doors.epochfile import EpochFile
from firn_node.replication.doors.groupfile import GroupFile
from firn_node.replication.record import GroupId
from firn_node.replication.state import LogView, Meta, Startup

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def machine_boot_id() -> str:
    """Random name of this start of the machine."""
    return _BOOT_ID.read_text().strip()


@dataclass(frozen=True, slots=True)
class Folder:
    """The files of an opened data folder that belong to its group."""

    startup: Startup
    group_file: GroupFile
    epoch_file: EpochFile


def open_folder(
    disk: Disk, folder: str, group_id: GroupId, log: CommitLog, *, boot_id: str, committed: int,
    largest_min_in_sync: int = 1, has_interval: bool = False,
) -> Folder:  # fmt: skip
    """What the folder says; ``committed``: known to be, the index's checkpoint.

    The lock of the folder proves the old process dead only on the machine that it ran on, and that has not
    restarted since: a volume may have moved while its old process lives on.
    *Errors*: Corrupt: rebuild under a new log_id. Invalid: another group's folder.
    """
    group_file, epoch_file = GroupFile(disk, folder, group_id), EpochFile(disk, folder)
    stored = group_file.load()
    if stored is None and (log.written_end > log.start or disk.exists(epoch_file.path)):
        raise Corrupt(
            f"{group_file.path}: expected what this folder promised to its group, found no file beside a log that was "
            "used; it is a single broker's folder, or the file was lost",
            file=group_file.path,
        )
    meta = stored.meta if stored is not None else Meta()
    view = LogView(
        Position(log.start), Position(log.written_end), Position(log.durable_end), epoch_file.load(log)
    )
    known = min(committed, log.durable_end) if log.written_end > log.start else 0
    startup = Startup(
        meta=meta, log=view, committed=Position(known),
        largest_min_in_sync=largest_min_in_sync, old_process_is_dead=meta.boot_id in ("", boot_id),
        boot_id=boot_id, was_shut_down=stored is not None and stored.was_shut_down, has_interval=has_interval,
    )  # fmt: skip
    return Folder(startup, group_file, epoch_file)

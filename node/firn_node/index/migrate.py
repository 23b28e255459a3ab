"""``firn index migrate``: turns a stopped broker's index into another kind.

Crash-safe and idempotent: a folder is complete whenever it has its final name (`opening.py`), the old one goes
only after the new one was compared with it, and whoever runs it again goes on from what is there.
"""

from dataclasses import dataclass

from firn.errors import Invalid, Unavailable
from firn_node import failpoints
from firn_node.disk import Disk
from firn_node.index.base import KINDS
from firn_node.index.opening import (
    build_missing,
    kinds_there,
    open_single,
    other_kind,
    remove_leftovers,
    require_fit_for_files,
    retire_folder,
)
from firn_node.index.verify import verify

MEMORY_BYTES = 32 << 20


@dataclass(frozen=True, slots=True)
class Migration:
    """What a migration did. ``entries`` is 0 when nothing had to be copied."""

    before: str
    after: str
    entries: int


def migrate(data_folder: str, to_kind: str, disk: Disk) -> Migration:
    """Make the index of the data folder one of kind ``to_kind``. *Effects*: durable on return; may be repeated.

    *Errors*: Unavailable (a broker runs there), Invalid (no index there, or light queues), LimitExceeded
    (partitions), Corrupt (the copy differs); the old index is whole in each case.
    """
    if to_kind not in KINDS:
        raise Invalid(f"unknown index kind {to_kind!r}: one of {', '.join(KINDS)}", kind=to_kind)
    folder = f"{data_folder}/index"
    if not disk.exists(folder):
        raise Invalid(f"{data_folder} has no index folder: is it a data folder?")
    try:
        with disk.lock(f"{data_folder}/LOCK"):
            return _migrate(folder, to_kind, disk)
    except BlockingIOError as error:
        raise Unavailable(f"a broker runs on {data_folder}: stop it first") from error


def _migrate(folder: str, to_kind: str, disk: Disk) -> Migration:
    """Steps: 1. leftovers go, 2. build what is missing, 3. remove what is not wanted."""
    remove_leftovers(folder, disk)
    there = kinds_there(folder, disk)
    if not there:
        raise Invalid(f"{folder} holds no index: nothing to migrate")
    before = there[0] if len(there) == 1 else "mirrored"
    if before == to_kind:
        return Migration(before, to_kind, 0)
    copied = 0
    if len(there) == 1:
        copied = build_missing(there[0], folder, disk, memory_bytes=MEMORY_BYTES)
    elif not _is_current(to_kind, folder, disk):
        retire_folder(f"{folder}/{to_kind}", disk)
        copied = build_missing(other_kind(to_kind), folder, disk, memory_bytes=MEMORY_BYTES)
    failpoints.step("index.migrate.built")
    if to_kind != "mirrored":
        retire_folder(f"{folder}/{other_kind(to_kind)}", disk)
    return Migration(before, to_kind, copied)


def _is_current(kind: str, folder: str, disk: Disk) -> bool:
    """Whether, of two, the index of this kind may stay: it is ahead, or the same.

    A mirrored broker that crashed may leave one behind, and RocksDB may hold entries from after the checkpoint:
    then it is built anew from the other one.
    """
    other = open_single(other_kind(kind), f"{folder}/{other_kind(kind)}", disk, memory_bytes=MEMORY_BYTES)
    try:
        if kind == "files":
            require_fit_for_files(other)
        kept = open_single(kind, f"{folder}/{kind}", disk, memory_bytes=MEMORY_BYTES)
        try:
            if kept.checkpoint != other.checkpoint:
                return kept.checkpoint > other.checkpoint
            differences = verify(kept, other)
        finally:
            kept.close()
    finally:
        other.close()
    return not differences

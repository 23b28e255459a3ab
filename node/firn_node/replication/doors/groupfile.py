"""What a data folder remembers of its group beside the log: ``DIR/group``, replaced whole at each change.

A u32 CRC-32C, little-endian, of all that follows, then a msgpack map:

============== ====== ==========================================================================
field          type   note
============== ====== ==========================================================================
version        1      of the format; a newer one is refused by name
group_id       str    a folder never changes its group
epoch          int    the highest seen: nothing is appended, cut or reported below it
record_version int    of the group record: a lower bound of what was seen
is_rebuilt     bool   what precedes the log is here; false: blank, or half rebuilt
is_unclean     bool   acknowledged records of ``flush: interval`` may be missing
boot_id        str    the machine's start under which this was stored
was_shut_down  bool   all that was written is durable, and nothing was written since
starts         int    processes that have opened the folder; left out: not counted yet
============== ====== ==========================================================================

Invariants: the file is older than no byte that was appended, cut or reported in its epoch; ``was_shut_down`` is
never true while a process has the folder. A log without this file is damage: its promise is lost.
"""

from dataclasses import dataclass
from typing import Any

import msgpack

from firn.crc import crc32c
from firn.errors import Corrupt, Invalid
from firn.types import Epoch
from firn_node.disk import Disk, read_file, replace_file
from firn_node.replication.record import GroupId
from firn_node.replication.state import Meta

VERSION = 1
NAME = "group"
_TYPES: dict[str, type] = {
    "version": int, "group_id": str, "epoch": int, "record_version": int, "is_rebuilt": bool, "is_unclean": bool,
    "boot_id": str, "was_shut_down": bool, "starts": int,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Stored:
    group_id: GroupId
    meta: Meta
    was_shut_down: bool


def encode(stored: Stored) -> bytes:
    meta = stored.meta
    body: bytes = msgpack.packb(
        {
            "version": VERSION, "group_id": stored.group_id, "epoch": meta.epoch, "record_version": meta.version,
            "is_rebuilt": meta.is_rebuilt, "is_unclean": meta.is_unclean, "boot_id": meta.boot_id,
            "was_shut_down": stored.was_shut_down,
        } | ({"starts": meta.starts} if meta.starts else {})
    )  # fmt: skip
    return crc32c(body).to_bytes(4, "little") + body


def parse(data: bytes, path: str) -> Stored:
    """What a file holds. *Errors*: Corrupt; Invalid for one that a newer firn wrote."""
    crc, body = int.from_bytes(data[:4], "little"), data[4:]
    if len(data) < 5 or crc != (found := crc32c(body)):
        raise Corrupt(
            f"{path}: expected CRC {crc:#010x}, found {found if len(data) > 4 else 0:#010x}", file=path
        )
    document: dict[str, Any] = msgpack.unpackb(body)
    if document.get("version") != VERSION:
        raise Invalid(
            f"{path}: version {document.get('version')} was written by a newer firn; this reads {VERSION}"
        )
    document.setdefault("starts", 0)
    for name, kind in _TYPES.items():
        if type(document.get(name)) is not kind:
            raise Corrupt(
                f"{path}: {name}: expected {kind.__name__}, found {document.get(name)!r}", file=path
            )
    meta = Meta(
        Epoch(document["epoch"]), document["record_version"], document["is_rebuilt"], document["is_unclean"],
        document["boot_id"], document["starts"],
    )  # fmt: skip
    return Stored(GroupId(document["group_id"]), meta, document["was_shut_down"])


class GroupFile:
    """The file of one folder, while this process has it. Calls come from one thread at a time."""

    def __init__(self, disk: Disk, folder: str, group_id: GroupId) -> None:
        self._disk = disk
        self._group_id = group_id
        self.path = f"{folder}/{NAME}"

    def load(self) -> Stored | None:
        """What the last process left; None for a new folder.

        *Effects*: the mark of a clean stop is gone, durably, on return. *Errors*: Corrupt: rebuild under a new
        log_id; Invalid for another group's folder.
        """
        try:
            data = read_file(self._disk, self.path)
        except FileNotFoundError:
            return None
        found = parse(data, self.path)
        if found.group_id != self._group_id:
            raise Invalid(
                f"{self.path}: this folder belongs to group {found.group_id}, not to {self._group_id}"
            )
        if found.was_shut_down:
            self.store(found.meta)
        return found

    def store(self, meta: Meta, *, was_shut_down: bool = False) -> None:
        """*Effects*: durable on return; a crash leaves the old or the new one."""
        replace_file(self._disk, self.path, encode(Stored(self._group_id, meta, was_shut_down)))

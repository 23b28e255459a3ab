"""What a data folder remembers of its rebuild.

::

    DIR/REBUILD                       the order to start anew: everything else goes before anything is opened
    DIR/given-up/<log_id>/log         a log that was put aside by such an order, for people
    DIR/rebuild/compacted/<topic_id>/<partition>/   pulled; whole once it has a MANIFEST
    DIR/rebuild/PULLED                all of them are here

``REBUILD`` and ``PULLED`` are a u32 CRC-32C, little-endian, of what follows, a msgpack map.

Invariants:

- an order is carried out as a whole or again, because its file goes last; whoever opens the folder carries it out
  first; the folder then has a new log_id, so no promise of the old one binds it and no old row can outlive its
  dropped tombstone;
- nothing is dispatched, and ``DIR/compacted`` holds nothing, until ``PULLED`` is there; then ``rebuild/compacted``
  takes its place by one rename, at the latest at the next start.
"""

import logging
from dataclasses import asdict, dataclass
from typing import Any

import msgpack

from firn.crc import crc32c
from firn.errors import Corrupt
from firn_node.disk import Disk, read_file, replace_file
from firn_node.failpoints import step

log = logging.getLogger("firn.rebuild")

ORDER = "REBUILD"
GIVEN_UP = "given-up"
FOLDER = "rebuild"
PULLED = f"{FOLDER}/PULLED"
COMPACTED = f"{FOLDER}/compacted"
# The identity last: while it is there, the rest is known to be of its log_id.
_FOLDERS = (FOLDER, "plans", "compacted", "index", "log")
_FILES = ("group", "epochs", "identity")


@dataclass(frozen=True, slots=True)
class Order:
    """Start anew. ``keeps_log``: put the commit log of ``log_id`` aside first."""

    reason: str
    log_id: str
    keeps_log: bool = False


def order(disk: Disk, data: str, wanted: Order) -> None:
    """Let the next process of this folder start anew. *Effects*: durable on return; may be repeated."""
    _store(disk, f"{data}/{ORDER}", asdict(wanted))


def is_ordered(disk: Disk, data: str) -> bool:
    return disk.exists(f"{data}/{ORDER}")


def carry_out(disk: Disk, data: str) -> Order | None:
    """Empty the folder if that was ordered. *Effects*: durable on return; a crash at any step repeats it.

    1. the log goes aside, or with the rest, 2. folders, 3. files, the identity last, 4. the order.
    *Errors*: Corrupt: the order is damaged.
    """
    if not is_ordered(disk, data):
        return None
    found = Order(**_load(disk, f"{data}/{ORDER}"))
    log.warning("the data folder %s starts anew: %s", data, found.reason)
    aside = f"{data}/{GIVEN_UP}/{found.log_id}"
    if found.keeps_log and disk.exists(f"{data}/log") and not disk.exists(f"{aside}/log"):
        disk.make_folder(aside)
        disk.rename(f"{data}/log", f"{aside}/log")
        disk.sync_folder(aside)
        step("rebuild.log_aside")
    for name in _FOLDERS:
        disk.remove_tree(f"{data}/{name}")
        step("rebuild.folder_gone")
    for name in _FILES:
        disk.unlink(f"{data}/{name}")
        step("rebuild.file_gone")
    disk.sync_folder(data)
    step("rebuild.emptied")
    disk.unlink(f"{data}/{ORDER}")
    disk.sync_folder(data)
    return found


@dataclass(frozen=True, slots=True)
class Pulled:
    """Everything was pulled; it is whole once the log is dispatched up to ``upto``. ``partitions``: how many there are."""

    upto: int
    partitions: int
    bytes: int


def note_pulled(disk: Disk, data: str, found: Pulled) -> None:
    """All partitions are here. *Effects*: durable on return, their folders too.

    1. the names of their folders, 2. the note.
    """
    for topic in disk.list(f"{data}/{COMPACTED}"):
        disk.sync_folder(f"{data}/{COMPACTED}/{topic}")
    disk.make_folder(f"{data}/{COMPACTED}")
    disk.sync_folder(f"{data}/{COMPACTED}")
    _store(disk, f"{data}/{PULLED}", asdict(found))


def pulled(disk: Disk, data: str) -> Pulled | None:
    """*Errors*: Corrupt: start anew."""
    path = f"{data}/{PULLED}"
    return Pulled(**_load(disk, path)) if disk.exists(path) else None


def install(disk: Disk, data: str) -> None:
    """Put what was pulled in its place, once all of it is here. *Effects*: durable on return; may be repeated.

    1. the empty folder goes, 2. one rename, 3. both parents are synced.
    """
    if not disk.exists(f"{data}/{PULLED}") or not disk.exists(f"{data}/{COMPACTED}"):
        return
    disk.remove_tree(f"{data}/compacted")
    step("rebuild.place_free")
    disk.rename(f"{data}/{COMPACTED}", f"{data}/compacted")
    step("rebuild.installed")
    disk.sync_folder(f"{data}/{FOLDER}")
    disk.sync_folder(data)


def forget(disk: Disk, data: str) -> None:
    """The rebuild is over. *Effects*: may be repeated."""
    disk.remove_tree(f"{data}/{FOLDER}")


def _store(disk: Disk, path: str, document: dict[str, Any]) -> None:
    body: bytes = msgpack.packb(document)
    replace_file(disk, path, crc32c(body).to_bytes(4, "little") + body)


def _load(disk: Disk, path: str) -> dict[str, Any]:
    data = read_file(disk, path)
    crc, body = int.from_bytes(data[:4], "little"), data[4:]
    if len(data) < 5 or crc != crc32c(body):
        raise Corrupt(f"{path}: expected CRC {crc:#010x}, found {crc32c(body):#010x}", file=path)
    document: dict[str, Any] = msgpack.unpackb(body)
    return document

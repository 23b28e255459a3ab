"""Which index a data folder has, and how one is opened.

``<folder>/rocksdb`` and ``<folder>/files`` are complete whenever they exist: what is being built or removed has the
suffix ``.new`` or ``.old`` and is deleted at the next open. What is there decides:

| there | asked: rocksdb or files | asked: mirrored |
|---|---|---|
| nothing | a new one | two new ones |
| the one asked | open it | open it, build the other from it |
| the other one alone | refused: migrate first | build the missing one |
| both (mirrored before, or a migration cut short) | open it, remove the other, which would go stale | open both |
"""

from itertools import islice

from firn.errors import Invalid, LimitExceeded
from firn_node import failpoints
from firn_node.disk import Disk
from firn_node.index.base import KINDS, NewEntry, PartitionIndex, refuse_light_queues
from firn_node.index.files import PARTITIONS_MAX, FilesIndex
from firn_node.index.mirrored import MirroredIndex
from firn_node.index.rocks import RocksIndex
from firn_node.index.verify import require_equal

Single = RocksIndex | FilesIndex
SINGLE_KINDS = ("rocksdb", "files")
COPY_ENTRIES = 100_000  # flushed after so many: bounds the memory of a copy


def open_index(kind: str, folder: str, disk: Disk, *, memory_bytes: int) -> PartitionIndex:
    """The index of the folder ``DIR/index``. *Errors*: Invalid (unknown kind, or another kind is there)."""
    if kind not in KINDS:
        raise Invalid(f"unknown index kind {kind!r}: one of {', '.join(KINDS)}", kind=kind)
    disk.make_folder(folder)
    remove_leftovers(folder, disk)
    there = kinds_there(folder, disk)
    if kind == "mirrored":
        if len(there) == 1:
            build_missing(there[0], folder, disk, memory_bytes=memory_bytes)
        return MirroredIndex(
            RocksIndex(_made(disk, f"{folder}/rocksdb"), memory_bytes=memory_bytes),
            FilesIndex(f"{folder}/files", disk),
        )
    other = other_kind(kind)
    if there == [other]:
        raise Invalid(
            f"the index in {folder} is of kind {other}, not {kind}: run `firn index migrate --to {kind}` first",
            kind=kind,
            found=other,
        )
    opened = open_single(kind, f"{folder}/{kind}", disk, memory_bytes=memory_bytes)
    if other in there:
        retire_folder(f"{folder}/{other}", disk)
    return opened


def open_single(kind: str, path: str, disk: Disk, *, memory_bytes: int) -> Single:
    if kind == "files":
        return FilesIndex(path, disk)
    return RocksIndex(_made(disk, path), memory_bytes=memory_bytes)


def kinds_there(folder: str, disk: Disk) -> list[str]:
    return [kind for kind in SINGLE_KINDS if disk.exists(f"{folder}/{kind}")]


def other_kind(kind: str) -> str:
    return "files" if kind == "rocksdb" else "rocksdb"


def build_missing(source_kind: str, folder: str, disk: Disk, *, memory_bytes: int) -> int:
    """Build the other kind's folder from the one there; how many entries it has.

    Steps: 1. copy into ``.new`` and flush it, 2. compare it with its source, 3. rename it, 4. sync the folder.
    *Effects*: durable on return; after a crash ``.new`` is removed and the source still holds everything.
    *Errors*: Invalid (light queues), LimitExceeded (partitions), before anything is written.
    """
    target_kind = other_kind(source_kind)
    target_path = f"{folder}/{target_kind}"
    disk.remove_tree(f"{target_path}.new")
    source = open_single(source_kind, f"{folder}/{source_kind}", disk, memory_bytes=memory_bytes)
    try:
        if target_kind == "files":
            require_fit_for_files(source)
        target = open_single(target_kind, f"{target_path}.new", disk, memory_bytes=memory_bytes)
        try:
            copied = copy_index(source, target)
            failpoints.step("index.migrate.copied")
            require_equal(source, target)
        finally:
            target.close()
    finally:
        source.close()
    failpoints.step("index.migrate.verified")
    disk.rename(f"{target_path}.new", target_path)
    failpoints.step("index.migrate.renamed")
    disk.sync_folder(folder)
    return copied


def require_fit_for_files(source: PartitionIndex) -> None:
    if next(source.lights(), None) is not None:
        raise refuse_light_queues("files")
    if sum(1 for _ in islice(source.partitions(), PARTITIONS_MAX + 1)) > PARTITIONS_MAX:
        raise LimitExceeded(
            f"the files index keeps at most {PARTITIONS_MAX} partitions and this broker has more: stay with rocksdb",
            limit=PARTITIONS_MAX,
        )


def copy_index(source: PartitionIndex, target: Single) -> int:
    """Copy all but light queues into an empty index and flush it with the source's checkpoint; entries copied."""
    copied = unflushed = 0
    for end in source.partitions():
        offset = 0
        while entries := source.scan(end.topic_id, end.partition, offset):
            target.append([NewEntry(end.topic_id, end.partition, *entry) for entry in entries])
            offset = entries[-1].end_offset
            copied += len(entries)
            unflushed += len(entries)
        target.restore_end(end)
        if unflushed >= COPY_ENTRIES:
            target.flush(0)
            unflushed = 0
    for topic_id, partition, state in source.states():
        target.put_state(topic_id, partition, state)
    for topic_id, partition, producer_id, row in source.producers():
        target.put_producer(topic_id, partition, producer_id, row)
    target.trim(source.log_start)
    failpoints.step("index.migrate.filled")
    target.flush(source.checkpoint)
    return copied


def retire_folder(path: str, disk: Disk) -> None:
    """Remove an index. Steps: 1. rename to ``.old``, 2. sync the folder, 3. remove the tree."""
    disk.remove_tree(f"{path}.old")
    disk.rename(path, f"{path}.old")
    failpoints.step("index.retire.renamed")
    disk.sync_folder(path.rpartition("/")[0])
    disk.remove_tree(f"{path}.old")


def remove_leftovers(folder: str, disk: Disk) -> None:
    for name in disk.list(folder):
        if name.endswith((".new", ".old")):
            disk.remove_tree(f"{folder}/{name}")


def _made(disk: Disk, path: str) -> str:
    disk.make_folder(path)  # RocksDB would not sync the parent
    return path

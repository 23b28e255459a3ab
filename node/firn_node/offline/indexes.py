"""The partition index against the commit log, and two indexes of a mirrored folder against one another.

An index is opened from a copy (table files by hard links), because opening one repairs and writes.
"""

import os
import shutil
import tempfile
from typing import TYPE_CHECKING

from firn.errors import FirnError
from firn_node.disk import RealDisk
from firn_node.index import PartitionIndex, verify
from firn_node.index.opening import kinds_there, open_single

if TYPE_CHECKING:
    from firn_node.offline.audit import Audit, LogBatch

MEMORY_BYTES = 16 << 20


def check_indexes(audit: "Audit") -> None:
    """Add to ``audit`` what is wrong with the indexes of its folder."""
    folder = os.path.join(audit.folder, "index")
    kinds = kinds_there(folder, audit.disk)
    if not kinds:
        audit.notes.append(f"{folder}: no index; the next start builds it from the commit log")
        return
    with tempfile.TemporaryDirectory(prefix="firn-verify-") as copy:
        opened: list[PartitionIndex] = []
        try:
            for kind in kinds:
                index = _open_copy(audit, folder, kind, copy)
                if index is not None:
                    opened.append(index)
                    _check_one(audit, os.path.join(folder, kind), index, copy)
            if len(opened) == 2:
                _check_mirror(audit, folder, opened)
        finally:
            for index in opened:
                index.close()


def _link_or_copy(source: str, target: str) -> str:
    if source.endswith(".sst"):
        try:
            os.link(source, target)
            return target
        except OSError:
            pass  # another file system: a copy then
    return shutil.copy2(source, target)


def _open_copy(audit: "Audit", folder: str, kind: str, copy: str) -> PartitionIndex | None:
    source, target = os.path.join(folder, kind), os.path.join(copy, kind)
    shutil.copytree(source, target, copy_function=_link_or_copy)
    audit.files += sum(len(files) for _, _, files in os.walk(source))
    try:
        return open_single(kind, target, RealDisk(copy), memory_bytes=MEMORY_BYTES)
    except (FirnError, OSError) as error:
        _damaged(audit, source, error, copy)
        return None


def _damaged(audit: "Audit", source: str, error: Exception, copy: str) -> None:
    """Name the file of the index that an error names, by its real place."""
    kind = os.path.basename(source)
    text = str(error).replace(os.path.join(copy, kind), source)
    names = [os.path.join(source, name) for name in sorted(os.listdir(source)) if name in text]
    audit.damaged(names[0] if names else source, f"the {kind} index cannot be read: {text}")


def _check_one(audit: "Audit", source: str, index: PartitionIndex, copy: str) -> None:
    try:
        ends = {(end.topic_id, end.partition): end.end_offset for end in index.partitions()}
        for partition, batches in audit.log.items():
            if partition in ends:
                _check_entries(audit, source, index, partition, batches)
            elif batches[0].position < index.checkpoint:
                # Topics that were deleted leave their bytes in the log and nothing in the index.
                audit.notes.append(
                    f"{source}: nothing of topic {partition[0]} partition {partition[1]}: deleted"
                )
        for _ in index.states():
            pass
        for _ in index.producers():
            pass
        for _ in index.lights():
            pass
    except (FirnError, OSError) as error:
        _damaged(audit, source, error, copy)
    if index.checkpoint > audit.log_end and audit.log:
        audit.damaged(
            source, "the index is ahead of the commit log", expected=audit.log_end, found=index.checkpoint
        )


def _check_entries(
    audit: "Audit", source: str, index: PartitionIndex, partition: tuple[int, int], batches: "list[LogBatch]"
) -> None:
    """Every entry names batches that are there; every batch below the checkpoint is named. One fault is told."""
    by_position = {batch.position: at for at, batch in enumerate(batches)}
    where = f"topic {partition[0]} partition {partition[1]}"
    offset, covered = 0, batches[0].base_offset
    while entries := index.scan(*partition, offset):
        for entry in entries:
            if entry.position < audit.log_start:
                covered = max(covered, entry.end_offset)
                continue
            at = by_position.get(entry.position)
            last = at
            while (
                last is not None and last < len(batches) and batches[last].last_offset + 1 < entry.end_offset
            ):
                last += 1
            is_right = (
                at is not None
                and last is not None
                and last < len(batches)
                and batches[at].base_offset <= entry.base_offset
                and batches[last].last_offset + 1 == entry.end_offset
                and batches[last].position + batches[last].size == entry.position + entry.size
            )
            if not is_right or entry.base_offset > covered:
                audit.damaged(
                    source, f"{where}: the entry of offsets {entry.base_offset} to {entry.end_offset} does not fit "
                    f"the commit log at position {entry.position}",
                )  # fmt: skip
                return
            covered = max(covered, entry.end_offset)
        offset = entries[-1].end_offset
    missing = next((b for b in batches if b.last_offset >= covered and b.position < index.checkpoint), None)
    if missing is not None:
        audit.damaged(
            source, f"{where}: offset {missing.base_offset} is in the commit log and not in the index"
        )


def _check_mirror(audit: "Audit", folder: str, opened: list[PartitionIndex]) -> None:
    a, b = opened
    differences = verify(a, b, limit=10)
    if all(index.checkpoint == audit.log_end for index in opened):
        for difference in differences:
            audit.damaged(folder, f"the two indexes differ: {difference}")
    elif differences:  # after a crash one may be behind, or hold what came after its checkpoint
        audit.notes.append(
            f"{folder}: the two indexes differ, the next start replays the log: {differences[0]}"
        )

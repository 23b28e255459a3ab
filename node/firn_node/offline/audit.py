"""The audit of a whole data folder: every file by its checksums, then the files against one another.

What is compared, beside each file's own checksums:

- commit log: segments without a gap; offsets of every partition dense; what lies at or above the last recorded
  durable end is a torn tail, which recovery cuts, and no damage;
- compacted log: each file that a manifest names is there and is what the manifest says; below the horizon one
  record a key; key indexes hold the fingerprints of the real keys under the folder's secret;
- maps: where a partition's offset 0 is still in the commit log, its key-value map from the raw bytes, by real
  keys, equals the map of the compacted view: the same newest record of every key, and no deleted key with a
  value;
- partition index: every kind that is there against the commit log, and so the kinds of a mirrored index against
  one another (``indexes``).

Memory: the keys of one partition, and a few words per batch of the log.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from firn.batch import Batch, Flag, parse_header
from firn.errors import FirnError, Invalid
from firn.types import OFFSETS_TOPIC_ID, TOPICS_TOPIC_ID
from firn_node.compaction.manifest import FILE_NAME, CleanSegment, DirtySegment, Manifest
from firn_node.compaction.segment import Layout
from firn_node.disk import Disk, RealDisk
from firn_node.log.headpage import HEAD_BYTES
from firn_node.offline import compacted, groupfiles, logfiles
from firn_node.offline.batches import Located
from firn_node.offline.keymaps import KeyMap, check_key_rows, compare_maps
from firn_node.offline.report import Damage, FileReport, damage_of
from firn_node.replication.doors import epochfile, groupfile

Partition = tuple[int, int]


@dataclass(frozen=True, slots=True)
class LogBatch:
    """Where a batch of a partition lies: segment file, byte, size, and its offsets."""

    path: str
    at: int
    size: int
    position: int
    base_offset: int
    last_offset: int


@dataclass(slots=True)
class Audit:
    """What has been found so far."""

    folder: str
    disk: Disk
    damages: list[Damage] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    files: int = 0
    batches: int = 0
    partitions_compared: int = 0
    keys_compared: int = 0
    log: dict[Partition, list[LogBatch]] = field(default_factory=dict)
    log_start: int = 0
    log_end: int = 0
    secret: Any = None

    def take(self, report: FileReport) -> FileReport:
        self.files += 1
        self.damages += report.damages
        self.notes += [f"{report.path}: {note}" for note in report.notes]
        return report

    def damaged(self, path: str, message: str, **more: Any) -> None:
        self.damages.append(
            Damage(path, more.pop("position", None), message, **{k: str(v) for k, v in more.items()})
        )

    def document(self) -> dict[str, Any]:
        return {
            "data": self.folder, "files": self.files, "batches": self.batches,
            "partitions_compared": self.partitions_compared, "keys_compared": self.keys_compared,
            "damaged": [damage.document() for damage in self.damages], "notes": self.notes,
        }  # fmt: skip


def audit_folder(folder: str, disk: Disk | None = None) -> Audit:
    """Everything that is wrong with a data folder. *Effects*: none on the files.

    Errors: Invalid when the folder is none of a broker.
    """
    audit = Audit(folder, disk or RealDisk(folder))
    if not os.path.isdir(os.path.join(folder, "log")):
        raise Invalid(f"{folder} is not the data folder of a broker: it has no folder log; check --data")
    _identity(audit)
    _group_files(audit)
    _commit_log(audit)
    for path in _partition_folders(audit):
        _partition(audit, path)
    from firn_node.offline.indexes import check_indexes

    check_indexes(audit)
    return audit


def _identity(audit: Audit) -> None:
    from firn_node.clock import RealRandomness
    from firn_node.engine.identity import load_identity

    path = os.path.join(audit.folder, "identity")
    audit.files += 1
    if not audit.disk.exists(path):
        audit.damaged(
            path, "the identity file is missing: without its secret every key index must be rebuilt"
        )
        return
    try:
        audit.secret = load_identity(audit.disk, audit.folder, RealRandomness()).secret_words()
    except FirnError as error:
        audit.damages.append(damage_of(error, file=path, position=0))
    except (ValueError, KeyError, TypeError) as error:
        audit.damaged(path, f"the identity cannot be read: {error}")


def _group_files(audit: Audit) -> None:
    """A single broker's folder has none of them."""
    for name, inspect in (
        (groupfile.NAME, groupfiles.inspect_group_file),
        (epochfile.NAME, groupfiles.inspect_epoch_file),
    ):
        path = os.path.join(audit.folder, name)
        if audit.disk.exists(path):
            audit.take(inspect(audit.disk, path))


def _commit_log(audit: Audit) -> None:
    folder = os.path.join(audit.folder, "log")
    names = audit.disk.list(folder)
    paths = [os.path.join(folder, name) for name in names if name.endswith(".log")]
    if not paths:
        audit.notes.append(f"{folder}: no segment; nothing was ever written, or the log is gone")
        return
    slots = [logfiles.read_slot(audit.disk, path)[0] for path in paths]
    newest = max((slot for slot in slots if slot is not None), key=lambda slot: slot.counter, default=None)
    if newest is not None:
        expired = [path for path in paths if logfiles.start_of(path) < newest.log_start]
        audit.notes += [f"{path}: below the log's start; recovery removes it" for path in expired]
        paths = [path for path in paths if path not in expired]
    starts = [logfiles.start_of(path) for path in paths]
    sure = newest.durable_end if newest else 0
    for at, path in enumerate(paths):
        end = starts[at + 1] if at + 1 < len(paths) else None
        if end is None and newest is not None and newest.is_marker:
            end = newest.end
        audit.take(
            logfiles.inspect_segment(audit.disk, path, end=end, sure=sure, on_batch=_collector(audit, path))
        )
        summary = path.removesuffix(".log") + ".summary"
        if audit.disk.exists(summary):
            audit.take(logfiles.inspect_summary(audit.disk, summary, end=end))
    audit.log_start = starts[0] if starts else 0
    _check_offsets(audit)
    _check_key_queries(audit, folder, names)


def _collector(audit: Audit, path: str) -> Any:
    start = logfiles.start_of(path)

    def collect(found: Located) -> None:
        h = found.batch.header
        position = start + found.at - HEAD_BYTES
        audit.batches += 1
        audit.log_end = max(audit.log_end, position + h.size)
        if h.flags & Flag.CONTROL:
            return  # of no partition
        audit.log.setdefault((h.topic_id, h.partition), []).append(
            LogBatch(path, found.at, h.size, position, h.base_offset, h.last_offset)
        )

    return collect


def _check_offsets(audit: Audit) -> None:
    """Offsets of a partition are dense, unless a damaged batch lies between."""
    damaged = {damage.file for damage in audit.damages}
    for (topic_id, partition), batches in audit.log.items():
        for before, after in pairwise(batches):
            if after.base_offset != before.last_offset + 1 and not {before.path, after.path} & damaged:
                audit.damaged(
                    after.path, f"topic {topic_id} partition {partition}: offsets have a gap",
                    position=after.at, expected=before.last_offset + 1, found=after.base_offset,
                )  # fmt: skip


def _check_key_queries(audit: Audit, folder: str, names: list[str]) -> None:
    from firn_node.offline.keyfiles import inspect_keys_file

    for name in names:
        if name.endswith(".keys"):
            audit.take(inspect_keys_file(audit.disk, os.path.join(folder, name)))


def _partition_folders(audit: Audit) -> Iterator[str]:
    base = os.path.join(audit.folder, "compacted")
    for topic in audit.disk.list(base):
        for partition in audit.disk.list(os.path.join(base, topic)):
            yield os.path.join(base, topic, partition)


def _partition(audit: Audit, folder: str) -> None:
    path = os.path.join(folder, FILE_NAME)
    names = audit.disk.list(folder)
    if FILE_NAME not in names:
        if names:
            audit.notes.append(
                f"{folder}: files without a manifest; leftovers of a crash, removed at first use"
            )
        return
    report, found = compacted.inspect_manifest(audit.disk, path)
    audit.take(report)
    if found is None:
        return
    try:
        identity = compacted.folder_identity(folder)
    except ValueError:
        identity = (found.topic_id, found.partition)
    if identity != (found.topic_id, found.partition):
        audit.damaged(
            path,
            "the manifest is of another partition",
            expected=identity,
            found=(found.topic_id, found.partition),
        )
        return
    before = len(audit.damages)
    view = KeyMap()
    for segment in found.segments:
        _clean_segment(audit, folder, found, segment, view)
    for dirty in found.dirty:
        _dirty_segment(audit, folder, found, dirty)
    leftovers = sorted(set(names) - found.files() - {FILE_NAME})
    audit.notes += [
        f"{os.path.join(folder, name)}: not in the manifest; removed at first use" for name in leftovers
    ]
    if len(audit.damages) == before:
        _compare(audit, folder, found, view)


def _clean_segment(audit: Audit, folder: str, found: Manifest, segment: CleanSegment, view: KeyMap) -> None:
    path = os.path.join(folder, segment.name)
    masked = np.zeros(segment.rows, np.bool_)
    if segment.mask is not None:
        mask_path = os.path.join(folder, segment.mask)
        if not audit.disk.exists(mask_path):
            audit.damaged(mask_path, "the manifest names this file, and it is missing")
            return
        report, bits = compacted.inspect_mask(audit.disk, mask_path, rows=segment.rows, masked=segment.masked)
        audit.take(report)
        if bits is None:
            return
        masked = bits
    if not audit.disk.exists(path):
        audit.damaged(path, "the manifest names this file, and it is missing")
        return
    keys: list[bytes] = []
    tombstones: list[bool] = []

    def on_batch(located: Located) -> None:
        row = len(keys)
        audit.batches += 1
        _check_owner(audit, path, located, found)
        keys.extend(located.batch.key_list())
        tombstones.extend(located.batch.columns.tombstones.tolist())
        if row + located.batch.header.records <= segment.rows:
            duplicate = view.add(located.batch, masked=masked[row : row + located.batch.header.records])
            if duplicate is not None:
                audit.damaged(
                    path,
                    f"offset {duplicate}: an unmasked row of a key that an older row serves",
                    position=located.at,
                )

    layout = Layout(rows=segment.rows, batches=segment.batches, bytes=segment.bytes)
    report = audit.take(compacted.inspect_segment(audit.disk, path, layout=layout, on_batch=on_batch))
    keys_path, keys_layout = path, layout
    if segment.keys is not None:
        keys_path, keys_layout = (
            os.path.join(folder, segment.keys),
            Layout(rows=segment.rows, batches=0, bytes=0),
        )
        if not audit.disk.exists(keys_path):
            audit.damaged(keys_path, "the manifest names this file, and it is missing")
            return
        report = audit.take(compacted.inspect_segment(audit.disk, keys_path, layout=keys_layout))
    if not report.damages and audit.secret is not None:
        fault = check_key_rows(
            *compacted.key_rows(audit.disk, keys_path, keys_layout),
            keys,
            tombstones,
            found.topic_id,
            audit.secret,
        )
        if fault:
            audit.damaged(keys_path, fault, position=keys_layout.keys_position)


def _check_owner(audit: Audit, path: str, located: Located, found: Manifest) -> None:
    h = located.batch.header
    if (h.topic_id, h.partition) != (found.topic_id, found.partition):
        audit.damaged(
            path, "a batch of another partition", position=located.at,
            expected=(found.topic_id, found.partition), found=(h.topic_id, h.partition),
        )  # fmt: skip


def _dirty_segment(audit: Audit, folder: str, found: Manifest, dirty: DirtySegment) -> None:
    path = os.path.join(folder, dirty.name)
    if not audit.disk.exists(path):
        audit.damaged(path, "the manifest names this file, and it is missing")
        return
    layout = Layout(rows=dirty.end - dirty.start, batches=0, bytes=0)
    report = audit.take(compacted.inspect_segment(audit.disk, path, layout=layout))
    batches = [
        b
        for b in audit.log.get((found.topic_id, found.partition), [])
        if dirty.start <= b.base_offset < dirty.end
    ]
    covered = sum(b.last_offset - b.base_offset + 1 for b in batches)
    if report.damages or audit.secret is None or covered != dirty.end - dirty.start:
        return
    keys: list[bytes] = []
    tombstones: list[bool] = []
    for batch in _read(audit, batches):
        keys.extend(batch.key_list())
        tombstones.extend(batch.columns.tombstones.tolist())
    fault = check_key_rows(
        *compacted.key_rows(audit.disk, path, layout), keys, tombstones, found.topic_id, audit.secret
    )
    if fault:
        audit.damaged(path, fault, position=0)


def _read(audit: Audit, batches: list[LogBatch]) -> Iterator[Batch]:
    """The batches again, sound as they were when they were walked."""
    for path, group in _by_file(batches):
        file = audit.disk.open(path)
        try:
            for found in group:
                data = file.pread(found.size, found.at)
                yield Batch(data, parse_header(data))
        finally:
            file.close()


def _by_file(batches: list[LogBatch]) -> Iterator[tuple[str, list[LogBatch]]]:
    groups: dict[str, list[LogBatch]] = {}
    for batch in batches:
        groups.setdefault(batch.path, []).append(batch)
    yield from groups.items()


def _compare(audit: Audit, folder: str, found: Manifest, view: KeyMap) -> None:
    """The map of the compacted view against the map of the raw bytes, where these begin with offset 0."""
    batches = audit.log.get((found.topic_id, found.partition), [])
    if found.horizon and (not batches or batches[0].base_offset != 0):
        return
    if found.topic_id in (TOPICS_TOPIC_ID, OFFSETS_TOPIC_ID) and not batches:
        return
    if any(b.path in {d.file for d in audit.damages} for b in batches):
        return
    raw = KeyMap()
    for batch in _read(audit, batches):
        raw.add_newer(batch)
        view.add_newer(batch, start=found.horizon)
    audit.partitions_compared += 1
    audit.keys_compared += len(raw)
    for sentence in compare_maps(raw, view, limit=10):
        audit.damaged(os.path.join(folder, FILE_NAME), sentence)

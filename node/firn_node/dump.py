"""``firn dump``: any file of a data folder, for people or as JSON, with what is wrong with it and where."""

import json
import os
import sys
from collections.abc import Mapping
from typing import Any

from firn import statement
from firn.batch import MAGIC as BATCH_MAGIC
from firn.cli.printing import print_document
from firn_node.compaction import manifest, mask
from firn_node.compaction.segment import FOOTER_BYTES
from firn_node.disk import Disk, RealDisk, read_file
from firn_node.log.segment import SUMMARY_MAGIC
from firn_node.offline import compacted, groupfiles, keyfiles, logfiles, planfiles
from firn_node.offline.batches import batch_items, note_damage, walk
from firn_node.offline.report import FileReport
from firn_node.plans import folder as plan_folder
from firn_node.replication.doors import epochfile, groupfile


def read_any(disk: Disk, path: str, *, with_records: bool = False) -> FileReport:
    """The report of one file, its kind found by name and first bytes.

    Errors: OSError.
    """
    name = os.path.basename(path)
    file = disk.open(path)
    try:
        head = file.pread(8, 0)
    finally:
        file.close()
    magic = int.from_bytes(head[:4], "little")
    if name.endswith(".log"):
        return logfiles.inspect_segment(disk, path, with_records=with_records)
    if name.endswith(".summary") or magic == SUMMARY_MAGIC:
        return logfiles.inspect_summary(disk, path)
    if name.endswith(".keys") and magic != BATCH_MAGIC and os.path.basename(os.path.dirname(path)) == "log":
        return keyfiles.inspect_keys_file(disk, path)
    if name == manifest.FILE_NAME or magic == manifest.MAGIC:
        return compacted.inspect_manifest(disk, path)[0]
    if magic == mask.MAGIC:
        return compacted.inspect_mask(disk, path)[0]
    if name == plan_folder.PLAN:
        return planfiles.inspect_plan(disk, path)
    if magic == statement.MAGIC:
        return planfiles.inspect_statement(disk, path)
    if name == "identity":
        return _identity(disk, path)
    if name == groupfile.NAME:
        return groupfiles.inspect_group_file(disk, path)
    if name == epochfile.NAME:
        return groupfiles.inspect_epoch_file(disk, path)
    if _has_footer(disk, path):
        return compacted.inspect_segment(disk, path, with_records=with_records)
    return _batches(disk, path, with_records=with_records)


def _has_footer(disk: Disk, path: str) -> bool:
    parent = os.path.basename(os.path.dirname(path))
    file = disk.open(path)
    try:
        tail = file.pread(FOOTER_BYTES, max(0, file.size() - FOOTER_BYTES))
    finally:
        file.close()
    return tail[:4] == b"FRSF" or parent.isdigit()


def _identity(disk: Disk, path: str) -> FileReport:
    from firn.crc import crc32c

    report = FileReport(path, "identity")
    data = read_file(disk, path)
    said, body = int.from_bytes(data[:4], "little"), data[4:]
    if (found := crc32c(body)) != said:
        report.damaged(0, "the identity", expected=f"CRC {said:#010x}", found=f"{found:#010x}")
        return report
    import msgpack

    document = msgpack.unpackb(body)
    report.facts.update(version=document.get("version"), log_id=document.get("log_id"), secret="not shown")
    return report


def _batches(disk: Disk, path: str, *, with_records: bool) -> FileReport:
    """A file of bare batches, such as a golden file or a bulk read that was kept."""
    report = FileReport(path, "batches")
    file = disk.open(path)
    try:
        size = file.size()
        for found in walk(file, 0, size):
            if isinstance(found, tuple):
                note_damage(report, *found)
        report.facts.update(bytes=size)
        report.items = iter(list(batch_items(file, 0, size, with_records=with_records)))
    finally:
        file.close()
    return report


def dump_command(paths: list[str], *, output: str | None, with_records: bool) -> None:
    """Print every file; ends with exit code 1 when one is damaged or cannot be read."""
    damaged = []
    documents = []
    for path in paths:
        report = read_any(RealDisk(os.path.dirname(path) or "."), path, with_records=with_records)
        if report.damages:
            damaged.append(report)
        if output in ("json", "yaml"):
            documents.append({**report.document(), "items": list(report.items)})
        else:
            _print(report)
    print_document(documents, output)
    if damaged:
        first = damaged[0].damages[0]
        print(f"firn: {len(damaged)} damaged file(s); the first fault: {first.sentence()}", file=sys.stderr)
        sys.exit(1)


def _print(report: FileReport) -> None:
    print(f"{report.path}: {report.kind}")
    _print_map(report.facts, "  ")
    for item in report.items:
        records = item.pop("records_list", None)
        print("  batch " + " ".join(f"{name}={_short(value)}" for name, value in item.items()))
        for record in records or ():
            print("    " + json.dumps(record, ensure_ascii=False))
    for note in report.notes:
        print(f"  note: {note}")
    for damage in report.damages:
        print(f"  damaged: {damage.sentence()}")


def _print_map(facts: Mapping[str, Any], indent: str) -> None:
    for name, value in facts.items():
        if isinstance(value, Mapping):
            print(f"{indent}{name}:")
            _print_map(value, indent + "  ")
        elif isinstance(value, list | tuple) and value and isinstance(value[0], Mapping):
            print(f"{indent}{name}:")
            for entry in value:
                print(f"{indent}  " + " ".join(f"{k}={_short(v)}" for k, v in entry.items()))
        else:
            print(f"{indent}{name}: {_short(value)}")


def _short(value: object) -> str:
    if isinstance(value, list | tuple):
        return ",".join(map(str, value)) or "-"
    return "-" if value is None else str(value)

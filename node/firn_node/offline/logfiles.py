"""Files of the commit log: segments with their head page, and summaries."""

import os
from collections.abc import Callable
from typing import Any

from firn_node.disk import Disk, File, read_file
from firn_node.log.headpage import HEAD_BYTES, SLOT_BYTES, SLOT_STRIDE, Slot, parse_page
from firn_node.log.segment import parse_name, parse_summary
from firn_node.offline.batches import Located, batch_items, note_damage, walk
from firn_node.offline.report import FileReport

OnBatch = Callable[[Located], None]


def start_of(path: str) -> int:
    """The position at which a log file begins, by its name; 0 for a name that is none."""
    found = parse_name(os.path.basename(path))
    return found[0] if found else 0


def read_slot(disk: Disk, path: str) -> tuple[Slot | None, bool]:
    """The newest slot of a segment's head page, and whether one is damaged."""
    file = disk.open(path)
    try:
        page = parse_page(file.pread(HEAD_BYTES, 0), start_of(path))
    finally:
        file.close()
    return page.newest, page.is_damaged


def inspect_segment(
    disk: Disk, path: str, *, end: int | None = None, sure: int | None = None, on_batch: OnBatch | None = None,
    with_records: bool = False,
) -> FileReport:  # fmt: skip
    """A commit log segment, every batch of it checked.

    ``end``: position at which the log, or the next segment, says that it ends. ``sure``: position below which all
    bytes were durable once; what is wrong at or above it is a torn tail and no damage. Both None: by its own page.
    """
    report = FileReport(path, "commit log segment")
    start = start_of(path)
    file = disk.open(path)
    try:
        newest = _head_page(report, file, start)
        size = file.size()
        if sure is None:
            sure = newest.durable_end if newest else start
        if end is None:
            end = (
                newest.end
                if newest and newest.is_marker and newest.end > start
                else start + size - HEAD_BYTES
            )
        limit = min(HEAD_BYTES + end - start, size)
        _check_batches(report, file, limit, start=start, sure=sure, on_batch=on_batch)
        if size < HEAD_BYTES + min(end, sure) - start:
            report.damaged(
                size,
                "the file is cut short",
                expected=f"{HEAD_BYTES + min(end, sure) - start} bytes",
                found=f"{size} bytes",
            )
        elif size > HEAD_BYTES + end - start:
            report.notes.append(
                f"{size - limit} bytes after its end at position {end}; recovery cuts them off"
            )
    finally:
        file.close()
    report.facts.update(start=start, bytes=size)
    report.items = _items(disk, path, limit, with_records)
    return report


def _items(disk: Disk, path: str, limit: int, with_records: bool) -> Any:
    file = disk.open(path)
    try:
        yield from batch_items(file, HEAD_BYTES, limit, with_records=with_records)
    finally:
        file.close()


def _head_page(report: FileReport, file: File, start: int) -> Slot | None:
    raw = file.pread(HEAD_BYTES, 0)
    page = parse_page(raw, start)
    if len(raw) < HEAD_BYTES:
        report.damaged(
            0, "the head page is cut short", expected=f"{HEAD_BYTES} bytes", found=f"{len(raw)} bytes"
        )
    for at in (0, SLOT_STRIDE):
        slot = raw[at : at + SLOT_BYTES]
        alone = bytes(at) + slot
        if any(slot) and parse_page(alone, start).newest is None:
            report.damaged(
                at,
                "a slot of the head page is damaged",
                expected="a valid CRC, or zeros",
                found=slot[:8].hex(),
            )
        rest = raw[at + SLOT_BYTES : at + SLOT_STRIDE]
        if any(rest):
            first = next(i for i, byte in enumerate(rest) if byte)
            report.damaged(
                at + SLOT_BYTES + first, "the head page is not zero", expected=0, found=rest[first]
            )
    if (newest := page.newest) is not None:
        report.facts["head_page"] = {
            "counter": newest.counter, "log_start": newest.log_start, "durable_end": newest.durable_end,
            "end": newest.end, "append_ms": newest.append_ms, "is_marker": newest.is_marker,
        }  # fmt: skip
    return newest


def _check_batches(
    report: FileReport, file: File, limit: int, *, start: int, sure: int, on_batch: OnBatch | None
) -> None:
    batches = records = 0
    for found in walk(file, HEAD_BYTES, limit):
        if isinstance(found, Located):
            batches += 1
            records += found.batch.header.records
            if on_batch is not None:
                on_batch(found)
            continue
        at, error = found
        position = start + at - HEAD_BYTES
        if position >= sure:
            report.notes.append(
                f"torn tail from byte {at} (position {position}): {error.message}; recovery cuts it off"
            )
            break
        note_damage(report, at, error)
    report.facts.update(batches=batches, records=records)


def inspect_summary(disk: Disk, path: str, *, end: int | None = None) -> FileReport:
    """The summary of a sealed segment. ``end`` None: as the file itself says."""
    report = FileReport(path, "segment summary")
    data = read_file(disk, path)
    said = int.from_bytes(data[16:24], "little", signed=True)
    topics = parse_summary(data, start=start_of(path), end=said if end is None else end)
    if topics is None:
        report.damaged(
            0, "the summary does not fit its CRC, its version or its segment; it is rebuilt at the next start"
        )
    else:
        report.facts.update(
            start=start_of(path), end=said,
            topics={str(topic): {"bytes": t.bytes, "newest_append_ms": t.newest_append_ms} for topic, t in topics.items()},
        )  # fmt: skip
    return report

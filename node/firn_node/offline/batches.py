"""Whole batches that lie one after another in a file: walked, checked, shown."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from firn.batch import HEADER_BYTES, Batch, BatchHeader, Flag, parse_header
from firn.errors import MalformedBatch
from firn.record import records_of
from firn_node.disk import File
from firn_node.offline.report import FileReport

RESYNC_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Located:
    """A sound batch and the byte of its file where it begins."""

    at: int
    batch: Batch


def walk(file: File, start: int, end: int) -> Iterator[Located | tuple[int, MalformedBatch]]:
    """Every batch of ``[start, end)``; one that is damaged comes as its byte and the error.

    A damaged payload is stepped over by its header's size. A damaged header ends the walk: where the next batch
    begins is known to nobody else.
    """
    at = start
    while at < end:
        head = file.pread(min(HEADER_BYTES, end - at), at)
        try:
            header = parse_header(head)
        except MalformedBatch as error:
            yield at, error
            return
        if at + header.size > end:
            yield at, MalformedBatch(f"batch of {header.size} bytes: only {end - at} are left of the file")
            return
        try:
            batch = Batch(file.pread(header.size, at), header)
            batch.verify()
            _ = batch.columns
            yield Located(at, batch)
        except MalformedBatch as error:
            yield at, error
        at += header.size


def note_damage(report: FileReport, at: int, error: MalformedBatch) -> None:
    """Put a damaged batch into a report, its expected and found values apart where the message has them."""
    text = error.message
    expected = found = None
    if "expected " in text and ", found " in text:
        expected, _, found = text.split("expected ", 1)[1].partition(", found ")
    report.damaged(at, text, expected=expected, found=found)


def flags_text(flags: int) -> list[str]:
    names = [flag.name.lower() for flag in Flag if flags & flag and flag.name]
    for name, shift in (("keys", 0), ("headers", 2), ("values", 4)):
        codec = flags >> shift & 3
        if codec:
            names.append(f"{name}_{('none', 'lz4', 'zstd')[codec]}")
    return names


def header_document(h: BatchHeader, at: int) -> dict[str, Any]:
    """A batch's header for people and for JSON."""
    return {
        "at": at, "size": h.size, "records": h.records, "topic_id": h.topic_id, "partition": h.partition,
        "base_offset": h.base_offset, "last_offset": h.last_offset, "epoch": h.epoch, "flags": flags_text(h.flags),
        "producer_id": h.producer_id, "producer_epoch": h.producer_epoch, "sequence": h.sequence,
        "min_timestamp": h.min_timestamp, "max_timestamp": h.max_timestamp, "append_timestamp": h.append_timestamp,
    }  # fmt: skip


def batch_items(file: File, start: int, end: int, *, with_records: bool) -> Iterator[dict[str, Any]]:
    """One document a sound batch; ``records`` in it when asked for."""
    for found in walk(file, start, end):
        if isinstance(found, Located):
            document = header_document(found.batch.header, found.at)
            if with_records:
                document["records_list"] = [r.document() for r in records_of(found.batch, "")]
            yield document

"""Files of a compacted log: manifest, segments, sealed dirty key indexes, masks."""

import os
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

import numpy as np
from numpy.typing import NDArray

from firn.crc import crc32c
from firn.errors import Corrupt
from firn_node.compaction import keyindex, manifest, mask
from firn_node.compaction.segment import BATCH_ENTRY, FOOTER_BYTES, KIND_KEYS, Footer, Layout, decode_footer
from firn_node.disk import Disk, File, read_file
from firn_node.offline.batches import Located, batch_items, note_damage, walk
from firn_node.offline.report import FileReport, damage_of

OnBatch = Callable[[Located], None]


def inspect_manifest(disk: Disk, path: str) -> tuple[FileReport, manifest.Manifest | None]:
    """A manifest; None when it cannot be read."""
    report = FileReport(path, "manifest")
    try:
        found = manifest.decode(read_file(disk, path), file=path)
        manifest.check_loaded(found, file=path, topic_id=found.topic_id, partition=found.partition)
    except Corrupt as error:
        report.damages.append(damage_of(error, file=path, position=0))
        return report, None
    report.facts.update(asdict(found))
    return report, found


def inspect_segment(
    disk: Disk,
    path: str,
    *,
    layout: Layout | None = None,
    on_batch: OnBatch | None = None,
    with_records: bool = False,
) -> FileReport:
    """A segment file, or a sealed dirty segment's key index: every batch, block and table of it checked.

    ``layout``: what the manifest says; None: what the footer says.
    """
    report = FileReport(path, "compacted segment")
    file = disk.open(path)
    try:
        size = file.size()
        footer = _footer(report, file, size, layout)
        if footer is not None:
            layout = Layout(rows=footer.rows, batches=footer.batches, bytes=footer.batches_bytes)
            if footer.kind == KIND_KEYS:
                report.kind = "key index"
            report.facts.update({name: value for name, value in asdict(footer).items() if name != "kind"})
        if layout is not None:
            if size != layout.footer_position + FOOTER_BYTES:
                report.damaged(
                    None, "the file's length", expected=layout.footer_position + FOOTER_BYTES, found=size
                )
            entries = _check_batches(report, file, layout, on_batch)
            _check_indexes(report, file, layout, footer, entries)
            report.items = _items(disk, path, layout, with_records)
    finally:
        file.close()
    return report


def _items(disk: Disk, path: str, layout: Layout, with_records: bool) -> Iterator[dict[str, Any]]:
    file = disk.open(path)
    try:
        yield from batch_items(file, 0, layout.bytes, with_records=with_records)
    finally:
        file.close()


def _footer(report: FileReport, file: File, size: int, layout: Layout | None) -> Footer | None:
    position = layout.footer_position if layout else max(0, size - FOOTER_BYTES)
    try:
        footer = decode_footer(file.pread(FOOTER_BYTES, position), file=report.path, position=position)
    except Corrupt as error:
        report.damages.append(damage_of(error, file=report.path, position=position))
        return None
    if layout is not None and (footer.rows, footer.batches, footer.batches_bytes) != (
        layout.rows,
        layout.batches,
        layout.bytes,
    ):
        report.damaged(
            position, "the footer is of another segment than the manifest's",
            expected=(layout.rows, layout.batches, layout.bytes), found=(footer.rows, footer.batches, footer.batches_bytes),
        )  # fmt: skip
        return None
    return footer


def _check_batches(
    report: FileReport, file: File, layout: Layout, on_batch: OnBatch | None
) -> list[tuple[int, ...]] | None:
    """The batch index as the batches themselves give it; None when one is damaged."""
    entries: list[tuple[int, ...]] = []
    row, newest, is_sound = 0, -(1 << 63), True
    for found in walk(file, 0, layout.bytes):
        if isinstance(found, Located):
            h = found.batch.header
            newest = max(newest, h.max_timestamp)
            entries.append(
                (row, h.records, h.base_offset, h.last_offset, found.at, h.size, h.keys_bytes, newest)
            )
            row += h.records
            if on_batch is not None:
                on_batch(found)
            continue
        note_damage(report, *found)
        is_sound = False
    return entries if is_sound else None


def _check_indexes(
    report: FileReport,
    file: File,
    layout: Layout,
    footer: Footer | None,
    entries: list[tuple[int, ...]] | None,
) -> None:
    data = file.pread(layout.batches * BATCH_ENTRY.itemsize, layout.bytes)
    if footer is not None and (found := crc32c(data)) != footer.batch_index_crc:
        report.damaged(
            layout.bytes,
            "the batch index",
            expected=f"CRC {footer.batch_index_crc:#010x}",
            found=f"{found:#010x}",
        )
    elif entries is not None and np.array(entries, BATCH_ENTRY).tobytes() != data:
        report.damaged(layout.bytes, "the batch index does not say what the batches are")
    tables = file.pread(keyindex.tables_bytes(layout.rows), layout.tables_position)
    if footer is not None and (found := crc32c(tables)) != footer.tables_crc:
        report.damaged(
            layout.tables_position,
            "the tables of the key index",
            expected=f"CRC {footer.tables_crc:#010x}",
            found=f"{found:#010x}",
        )
        return
    if len(tables) == keyindex.tables_bytes(layout.rows):
        _check_key_blocks(report, file, layout, tables)


def _check_key_blocks(report: FileReport, file: File, layout: Layout, tables: bytes) -> None:
    blocks = -(-layout.rows // keyindex.BLOCK_ROWS)
    fences = np.frombuffer(tables, "<u8", blocks)
    crcs = np.frombuffer(tables, "<u4", blocks, 8 * blocks)
    last_hi = -1
    for number in range(blocks):
        position = layout.keys_position + number * keyindex.BLOCK_BYTES
        rows = min(keyindex.BLOCK_ROWS, layout.rows - number * keyindex.BLOCK_ROWS)
        data = file.pread(rows * keyindex.ROW_BYTES, position)
        if (found := crc32c(data)) != int(crcs[number]):
            report.damaged(
                position,
                f"block {number} of the key index",
                expected=f"CRC {int(crcs[number]):#010x}",
                found=f"{found:#010x}",
            )
            last_hi = -1
            continue
        hi = np.frombuffer(data, "<u8", rows)
        if int(hi[0]) != int(fences[number]) or int(hi[0]) < last_hi or (hi[1:] < hi[:-1]).any():
            report.damaged(position, f"block {number} of the key index is not in order")
        last_hi = int(hi[-1])


def key_rows(disk: Disk, path: str, layout: Layout) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """All (hi, word) of a key index, unchecked; ``inspect_segment`` checks."""
    file = disk.open(path)
    try:
        his, words = [], []
        for at in range(0, layout.rows, keyindex.BLOCK_ROWS):
            rows = min(keyindex.BLOCK_ROWS, layout.rows - at)
            data = np.frombuffer(file.pread(rows * keyindex.ROW_BYTES, layout.keys_position + at * 16), "<u8")
            his.append(data[:rows])
            words.append(data[rows:])
    finally:
        file.close()
    empty = np.empty(0, np.uint64)
    return np.concatenate([empty, *his]), np.concatenate([empty, *words])


def inspect_mask(
    disk: Disk, path: str, *, rows: int | None = None, masked: int | None = None
) -> tuple[FileReport, NDArray[np.bool_] | None]:
    """A mask, and True for every masked row; None when it is damaged. Without ``rows``: as the file says."""
    report = FileReport(path, "mask")
    data = read_file(disk, path)
    said_rows, said_masked = (int.from_bytes(data[at : at + 4], "little") for at in (8, 12))
    try:
        bits = mask.decode(
            data,
            file=path,
            rows=said_rows if rows is None else rows,
            masked=said_masked if masked is None else masked,
        )
    except Corrupt as error:
        report.damages.append(damage_of(error, file=path))
        return report, None
    report.facts.update(rows=said_rows, masked=said_masked)
    if any(data[20 : mask.HEAD_BYTES]):
        report.damaged(20, "a field that is zero", expected=0, found=int.from_bytes(data[20:24], "little"))
    found = mask.rows_of(bits, 0, said_rows)
    if int(found.sum()) != said_masked:
        report.damaged(12, "number of masked rows", expected=said_masked, found=int(found.sum()))
    return report, found


def folder_identity(folder: str) -> tuple[int, int]:
    """(topic_id, partition) that a partition's folder is named after. Errors: ValueError."""
    head, partition = os.path.split(folder)
    return int(os.path.basename(head)), int(partition)

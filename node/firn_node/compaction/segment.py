"""Segment files: immutable, fsynced once.

=========== ==================== ==================================================================
part        bytes                note
=========== ==================== ==================================================================
batches     ``bytes``            whole batches in offset order, from byte 0; positions are multiples of 8
batch index 48 per batch         see below
key index   16 per row           blocks, then fences and block CRCs: see ``keyindex``
footer      112                  the last bytes of the file; see below
=========== ==================== ==================================================================

A sealed dirty segment's file has key index and footer only (0 batches): its batches stay in the commit log.

Batch index entry, 48 bytes: first_row u32, rows u32, first_offset i64, last_offset i64, position u64, size u32,
keys_bytes u32, max_timestamp i64 (running maximum, so that a time can be searched).

Footer, 112 bytes: magic u32 (0x46535246, ``FRSF``), version u16 (1), kind u16 (0 clean, 1 key index only),
topic_id u64, partition u32, zero u32, start i64, end i64, rows u64, tombstones u64, batches u64, bytes u64,
batch_index_crc u32, tables_crc u32 (fences and block CRCs), zero u64[3], zero u32, crc u32 (of the 108 before).

Every position follows from rows, batches and bytes, which the manifest repeats: a damaged footer or index is
noticed and rebuilt from the batches, whose own CRCs are checked on the way.
"""

import struct
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from firn.batch import HEADER_BYTES, Batch, Buffer, corrupt, parse_header
from firn.crc import crc32c
from firn.errors import Corrupt, MalformedBatch
from firn_node.compaction.ahead import AHEAD, BATCH_BYTES_MIN, BATCHES
from firn_node.compaction.answers import I64
from firn_node.compaction.keyindex import (
    BLOCK_ROWS,
    ROW_BYTES,
    BlockCache,
    DamagedIndex,
    FileKeyIndex,
    KeyIndexWriter,
    tables_bytes,
)
from firn_node.compaction.rows import BatchRows, open_rows
from firn_node.compaction.taking import PLACE_COLUMNS
from firn_node.disk import Disk, File
from firn_node.filecache import FileCache, FileRange

MAGIC = 0x46535246
VERSION = 1
KIND_CLEAN = 0
KIND_KEYS = 1
_FOOTER = struct.Struct("<IHHQIIqqQQQQII24xI")
FOOTER_BYTES = _FOOTER.size + 4
assert FOOTER_BYTES == 112
SPILL_BYTES = 256 << 10

BATCH_ENTRY = np.dtype(
    [
        ("first_row", "<u4"), ("rows", "<u4"), ("first_offset", "<i8"), ("last_offset", "<i8"),
        ("position", "<u8"), ("size", "<u4"), ("keys_bytes", "<u4"), ("max_timestamp", "<i8"),
    ]
)  # fmt: skip
assert BATCH_ENTRY.itemsize == 48


@dataclass(frozen=True, slots=True, kw_only=True)
class Footer:
    kind: int
    topic_id: int
    partition: int
    start: int
    end: int
    rows: int
    tombstones: int
    batches: int
    batches_bytes: int
    batch_index_crc: int
    tables_crc: int

    def encode(self) -> bytes:
        body = _FOOTER.pack(
            MAGIC, VERSION, self.kind, self.topic_id, self.partition, 0, self.start, self.end, self.rows,
            self.tombstones, self.batches, self.batches_bytes, self.batch_index_crc, self.tables_crc, 0,
        )  # fmt: skip
        return body + crc32c(body).to_bytes(4, "little")


def decode_footer(data: bytes, *, file: str, position: int) -> Footer:
    """*Errors*: DamagedIndex, naming the byte, what was expected and what was found."""

    def fault(at: int, expected: object, found: object) -> DamagedIndex:
        return DamagedIndex(
            f"{file} at byte {position + at}: footer: expected {expected}, found {found}",
            file=file, position=position + at, expected=str(expected), found=str(found),
        )  # fmt: skip

    if len(data) != FOOTER_BYTES:
        raise fault(0, f"{FOOTER_BYTES} bytes", len(data))
    crc = int.from_bytes(data[-4:], "little")
    if (found := crc32c(data[:-4])) != crc:
        raise fault(FOOTER_BYTES - 4, f"CRC {crc:#010x}", f"{found:#010x}")
    magic, version, kind, topic_id, partition, _, *rest, _ = _FOOTER.unpack_from(data)
    if (magic, version) != (MAGIC, VERSION) or kind not in (KIND_CLEAN, KIND_KEYS):
        raise fault(0, f"{MAGIC:#x} version {VERSION}", f"{magic:#x} version {version} kind {kind}")
    names = (
        "start",
        "end",
        "rows",
        "tombstones",
        "batches",
        "batches_bytes",
        "batch_index_crc",
        "tables_crc",
    )
    return Footer(kind=kind, topic_id=topic_id, partition=partition, **dict(zip(names, rest, strict=True)))


class SpillFile:
    """A new file that is written in pieces and open only while a piece goes out: thousands may be in work."""

    def __init__(self, disk: Disk, path: str, spill_bytes: int = SPILL_BYTES) -> None:
        self.path = path
        self.size = 0  # bytes added so far
        self._disk = disk
        self._spill_bytes = spill_bytes
        self._pending: list[Buffer] = []
        self._pending_bytes = 0
        self._is_made = False

    def add(self, data: Buffer) -> None:
        """The bytes are copied or written before return: they may be a part of something larger."""
        spills = self._pending_bytes + len(data) >= self._spill_bytes
        self._pending.append(data if spills else bytes(data))
        self._pending_bytes += len(data)
        self.size += len(data)
        if spills:
            self._spill(sync=False)

    def finish(self) -> None:
        """*Effects*: the bytes are durable on return; the name is after a sync of the folder."""
        self._spill(sync=True)

    def _spill(self, *, sync: bool) -> None:
        file: File = self._disk.open(self.path, "write" if self._is_made else "create")
        self._is_made = True
        try:
            if self._pending:
                file.pwrite(self._pending, self.size - self._pending_bytes)
                self._pending, self._pending_bytes = [], 0
            if sync:
                file.sync()
        finally:
            file.close()


class SegmentWriter:
    """Writes one segment file: batches, then key rows, then ``finish``.

    *Effects*: durable after ``finish`` but for its name: the caller syncs the folder once for all files.
    """

    def __init__(
        self,
        disk: Disk,
        path: str,
        *,
        topic_id: int,
        partition: int,
        kind: int = KIND_CLEAN,
        spill_bytes: int = SPILL_BYTES,
    ) -> None:
        self.path = path
        self.rows = 0
        self.bytes = 0
        self.start = self.end = 0
        self._identity = (topic_id, partition)
        self._kind = kind
        self._file = SpillFile(disk, path, spill_bytes)
        self._entries: list[tuple[int, ...]] = []
        self._max_timestamp = -(1 << 63)
        self._batch_index_crc = 0
        self._keys: KeyIndexWriter | None = None

    @property
    def batches(self) -> int:
        return len(self._entries)

    @property
    def file_bytes(self) -> int:
        return self._file.size

    def add_batch(
        self, data: Buffer, *, rows: int, first: int, last: int, keys_bytes: int, max_timestamp: int
    ) -> None:
        """A whole batch of ``rows`` records with offsets from ``first`` to ``last``."""
        if not self._entries:
            self.start = first
        self._max_timestamp = max(self._max_timestamp, max_timestamp)
        self._entries.append(
            (self.rows, rows, first, last, self.bytes, len(data), keys_bytes, self._max_timestamp)
        )
        self._file.add(data)
        self.rows += rows
        self.bytes += len(data)
        self.end = last + 1

    def add_keys(self, hi: NDArray[np.uint64], word: NDArray[np.uint64]) -> None:
        """The next rows of the key index, in its order; no batch may follow."""
        self._key_writer().add(hi, word)

    def finish(self, *, start: int | None = None, end: int | None = None) -> Footer:
        """*Errors*: Corrupt when the key rows are not as many as the batches' records."""
        keys = self._key_writer()
        tables = keys.finish()
        if self._kind == KIND_CLEAN and keys.rows != self.rows:
            raise Corrupt(
                f"{self.path}: its key index has {keys.rows} rows, its batches {self.rows} records: "
                "the key indexes it was made from do not fit their batches",
                file=self.path, position=self.bytes, expected=str(self.rows), found=str(keys.rows),
            )  # fmt: skip
        footer = Footer(
            kind=self._kind, topic_id=self._identity[0], partition=self._identity[1],
            start=self.start if start is None else start, end=self.end if end is None else end, rows=keys.rows,
            tombstones=keys.tombstones, batches=self.batches, batches_bytes=self.bytes,
            batch_index_crc=self._batch_index_crc, tables_crc=crc32c(tables),
        )  # fmt: skip
        self._file.add(tables)
        self._file.add(footer.encode())
        self._file.finish()
        return footer

    def _key_writer(self) -> KeyIndexWriter:
        if self._keys is None:
            index = np.array(self._entries, BATCH_ENTRY).tobytes()
            self._batch_index_crc = crc32c(index)
            self._file.add(index)
            self._keys = KeyIndexWriter(self._file.add)
        return self._keys


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Where the parts of a file lie; all of it follows from what the manifest says."""

    rows: int
    batches: int
    bytes: int

    @property
    def keys_position(self) -> int:
        return self.bytes + self.batches * BATCH_ENTRY.itemsize

    @property
    def tables_position(self) -> int:
        return self.keys_position + self.rows * ROW_BYTES

    @property
    def footer_position(self) -> int:
        return self.tables_position + tables_bytes(self.rows)


def read_footer(file: File, layout: Layout) -> Footer:
    """*Errors*: DamagedIndex, also when the footer tells of another layout."""
    position = layout.footer_position
    footer = decode_footer(file.pread(FOOTER_BYTES, position), file=file.path, position=position)
    if (footer.rows, footer.batches, footer.batches_bytes) != (layout.rows, layout.batches, layout.bytes):
        raise DamagedIndex(
            f"{file.path} at byte {position}: the footer is of another segment",
            file=file.path,
            position=position,
        )
    return footer


def open_key_index(cache: FileCache, path: str, layout: Layout) -> FileKeyIndex:
    """The key index of a file; reads its tables. *Errors*: DamagedIndex."""
    with cache.reading(path) as file:
        footer = read_footer(file, layout)
        tables = file.pread(tables_bytes(layout.rows), layout.tables_position)
    if (found := crc32c(tables)) != footer.tables_crc or len(tables) != tables_bytes(layout.rows):
        raise DamagedIndex(
            f"{path} at byte {layout.tables_position}: key index tables: expected CRC {footer.tables_crc:#010x}, "
            f"found {found:#010x}",
            file=path, position=layout.tables_position, expected=f"{footer.tables_crc:#010x}", found=f"{found:#010x}",
        )  # fmt: skip
    blocks = -(-layout.rows // BLOCK_ROWS)
    fences = np.frombuffer(tables, np.uint64, blocks)
    crcs = np.frombuffer(tables, np.uint32, blocks, 8 * blocks)
    return FileKeyIndex(
        cache, path, position=layout.keys_position, rows=layout.rows, fences=fences, crcs=crcs
    )


class SegmentReader:
    """Batches and indexes of one clean segment file, loaded when first needed. Any thread."""

    def __init__(
        self, cache: FileCache, path: str, layout: Layout, blocks: BlockCache, *, keys_path: str | None
    ) -> None:
        self.path = path
        self.layout = layout
        self._cache = cache
        self._blocks = blocks
        self._token = object()  # of this open: a path may name other bytes after a crash and a reopen
        self._keys_path = keys_path
        self._batches: NDArray[Any] | None = None
        self._first_rows: I64 | None = None
        self._keys: FileKeyIndex | None = None
        self.places = np.zeros((layout.batches, PLACE_COLUMNS), np.int64)  # of even batches that were touched
        self._touched = bytearray(layout.batches)  # 1: the batch's CRCs and columns were found good

    @property
    def batches(self) -> NDArray[Any]:
        """The batch index; one that is damaged is rebuilt from the batches' headers. *Errors*: Corrupt."""
        if self._batches is None:
            try:
                self._batches = self._load_batches()
            except DamagedIndex:
                self._batches = self._scan_batches()
        return self._batches

    @property
    def keys(self) -> FileKeyIndex:
        """*Errors*: DamagedIndex."""
        if self._keys is None:
            if self._keys_path is not None:
                layout = Layout(rows=self.layout.rows, batches=0, bytes=0)
                self._keys = open_key_index(self._cache, self._keys_path, layout)
            else:
                self._keys = open_key_index(self._cache, self.path, self.layout)
        return self._keys

    @property
    def first_rows(self) -> I64:
        """The number of the first row of each batch. *Errors*: Corrupt."""
        if self._first_rows is None:
            self._first_rows = self.batches["first_row"].astype(np.int64)
        return self._first_rows

    def range(self, position: int, size: int) -> FileRange:
        return FileRange(self._cache.lease(self.path), position, size)

    def read(self, number: int, *, keys_only: bool = False) -> Batch:
        """A batch with its CRCs checked. *Errors*: Corrupt."""
        entry = self.batches[number]
        position = int(entry["position"])
        size = HEADER_BYTES + int(entry["keys_bytes"]) if keys_only else int(entry["size"])
        with self._cache.reading(self.path) as file:
            data = file.pread(size, position)
        try:
            batch = Batch(data)
            batch.verify()
        except MalformedBatch as error:
            raise corrupt(error, file=self.path, position=position) from error
        return batch

    def rows(self, number: int) -> BatchRows:
        """The rows of a batch, to be taken one by one, through the cache.

        The CRCs are checked at the first touch since the file was opened. *Errors*: Corrupt.
        """
        found: BatchRows = self._blocks.get((self._token, number), lambda: self._open_rows(number))
        return found

    def rows_of_one(self, number: int) -> BatchRows:
        """As ``rows``, for one key; at a first touch the next batches are checked ahead."""
        is_first = not self._touched[number]
        found = self.rows(number)
        if is_first and self.range(0, 0).is_real():
            for behind in range(number + 1, min(number + 1 + BATCHES, self.layout.batches)):
                if not self._touched[behind]:
                    AHEAD.ask(partial(self._check_ahead, behind))
        return found

    def _check_ahead(self, number: int) -> None:
        entry = self.batches[number]
        size = int(entry["size"])
        if size < BATCH_BYTES_MIN or self._touched[number]:
            return
        if self.range(int(entry["position"]), size).is_in_memory():
            self.rows(number)

    def _open_rows(self, number: int) -> tuple[BatchRows, int]:
        entry = self.batches[number]
        position = int(entry["position"])
        whole = None if self._touched[number] else self._whole_batch(position, int(entry["size"]))
        try:
            found = open_rows(self, position, int(entry["rows"]), whole)
        except MalformedBatch as error:
            raise corrupt(error, file=self.path, position=position) from error
        self._touched[number] = 1
        if found.even is not None:
            self.places[number] = (position, int(entry["size"]), *found.even)
        return found, found.nbytes

    def _whole_batch(self, position: int, size: int) -> Batch:
        """A batch with CRCs and columns checked."""
        with self._cache.lease(self.path) as file:
            data = file.pread(size, position)
        try:
            batch = Batch(data)
            batch.verify()
            _ = batch.columns
        except MalformedBatch as error:
            raise corrupt(error, file=self.path, position=position) from error
        return batch

    def file_of(self, position: int) -> int:
        return 0

    def fault(self, position: int, what: str) -> Corrupt:
        return Corrupt(f"{self.path} at byte {position}: {what}", file=self.path, position=position)

    def offset_of(self, row: int) -> int:
        """The offset of a row."""
        batches = self.batches
        number = int(np.searchsorted(batches["first_row"], row, "right")) - 1
        entry = batches[number]
        first = int(entry["first_offset"])
        if int(entry["last_offset"]) - first + 1 == int(entry["rows"]):
            return first + row - int(entry["first_row"])
        return int(self.offsets(number)[row - int(entry["first_row"])])

    def offsets(self, number: int) -> I64:
        """The offsets of a batch's rows. *Errors*: Corrupt."""
        entry = self.batches[number]
        first, last = int(entry["first_offset"]), int(entry["last_offset"])
        if last - first + 1 == int(entry["rows"]):
            return np.arange(first, last + 1)
        found: I64 = self.read(number, keys_only=True).columns.offsets
        return found

    def row_of(self, offset: int) -> int:
        """The first row whose offset is ``offset`` or above; the number of rows when there is none."""
        batches = self.batches
        number = int(np.searchsorted(batches["last_offset"], offset, "left"))
        if number == len(batches):
            return self.layout.rows
        entry = batches[number]
        first_row, first = int(entry["first_row"]), int(entry["first_offset"])
        if offset <= first:
            return first_row
        if int(entry["last_offset"]) - first + 1 == int(entry["rows"]):
            return first_row + offset - first
        return first_row + int(np.searchsorted(self.offsets(number), offset, "left"))

    def _load_batches(self) -> NDArray[Any]:
        layout = self.layout
        size = layout.batches * BATCH_ENTRY.itemsize
        with self._cache.reading(self.path) as file:
            footer = read_footer(file, layout)
            data = file.pread(size, layout.bytes)
        if len(data) != size or crc32c(data) != footer.batch_index_crc:
            raise DamagedIndex(
                f"{self.path} at byte {layout.bytes}: batch index CRC", file=self.path, position=layout.bytes
            )
        return np.frombuffer(data, BATCH_ENTRY)

    def _scan_batches(self) -> NDArray[Any]:
        found: list[tuple[int, ...]] = []
        at = row = 0
        newest = -(1 << 63)
        with self._cache.reading(self.path) as file:
            while at < self.layout.bytes:
                try:
                    h = parse_header(file.pread(HEADER_BYTES, at))
                except MalformedBatch as error:
                    raise corrupt(error, file=self.path, position=at) from error
                newest = max(newest, h.max_timestamp)
                found.append((row, h.records, h.base_offset, h.last_offset, at, h.size, h.keys_bytes, newest))
                row, at = row + h.records, at + h.size
        if (len(found), row, at) != (self.layout.batches, self.layout.rows, self.layout.bytes):
            raise Corrupt(
                f"{self.path}: its batches hold {row} rows in {at} bytes, the manifest says {self.layout.rows} "
                f"in {self.layout.bytes}",
                file=self.path, position=at, expected=str(self.layout.rows), found=str(row),
            )  # fmt: skip
        return np.array(found, BATCH_ENTRY)

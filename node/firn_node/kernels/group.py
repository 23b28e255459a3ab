"""What arrives to be appended: whole batches in one buffer, checked, hashed and then stamped.

``inspect_group`` accepts a batch only if ``firn.batch`` can decode it and every reader after it: structure,
limits, both payload CRCs, text columns, and that compressed columns really decompress to what they declare,
because a batch that cannot be decoded would stop a compaction later. It is stricter than ``firn.batch`` where
a lie would mislead an index: the header's timestamps and offsets must be those of the columns, the flags
those of the columns that are there, and a batch's plain size is held to the limit of its stored size.

The flags are checked for being known only: whether a client may send ``REBUILT``, ``CONTROL`` or sparse
offsets is the engine's to decide.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from firn import limits
from firn.batch import HEADER_BYTES, Batch, Buffer, parse_header
from firn.errors import FirnError, Invalid, LimitExceeded, MalformedBatch
from firn_node.kernels import walking
from firn_node.kernels.hashing import fingerprint
from firn_node.kernels.jit import aligned
from firn_node.kernels.walking import Fault

HEADER_DTYPE = np.dtype(
    [
        ("magic", "<u4"), ("version", "<u2"), ("flags", "<u2"), ("header_crc", "<u4"), ("size", "<u4"),
        ("keys_bytes", "<u4"), ("records", "<u4"), ("keys_crc", "<u4"), ("values_crc", "<u4"),
        ("topic_id", "<u8"), ("partition", "<u4"), ("epoch", "<u4"), ("base_offset", "<i8"),
        ("last_offset", "<i8"), ("producer_id", "<u8"), ("producer_epoch", "<u4"), ("sequence", "<u4"),
        ("min_timestamp", "<i8"), ("max_timestamp", "<i8"), ("append_timestamp", "<i8"),
    ]
)  # fmt: skip
assert HEADER_DTYPE.itemsize == HEADER_BYTES
_NEEDS_DECODE = int(Fault.NEEDS_DECODE)  # a member's name is looked up slowly


class Head(NamedTuple):
    """A batch's header, and what was found of it, as plain numbers: ``HEADER_DTYPE`` and four columns of ``Group``."""

    magic: int
    version: int
    flags: int
    header_crc: int
    announced_size: int
    keys_bytes: int
    records: int
    keys_crc: int
    values_crc: int
    topic_id: int
    partition: int
    epoch: int
    base_offset: int
    last_offset: int
    producer_id: int
    producer_epoch: int
    sequence: int
    min_timestamp: int
    max_timestamp: int
    append_timestamp: int
    start: int
    size: int
    fault: int
    first_row: int


class _Column:
    """A header field of all batches: a view of ``Group.headers``."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, group: "Group", owner: type | None = None) -> NDArray[Any]:
        return group.headers[self._name]


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """The batches of one buffer, one row each, and all their records' fingerprints.

    *Shape*: of a ``NOT_A_BATCH`` the header fields are 0. ``start`` and ``size`` are always within ``data``. A
    faulty batch has no record rows: those of batch i are ``rows(i)``. ``detail`` is the record that a fault is
    about, else -1. ``stamp_group`` changes the offsets, ``epoch`` and ``append_timestamp``.
    """

    data: NDArray[np.uint8]
    headers: NDArray[Any]
    start: NDArray[np.int64]
    size: NDArray[np.int64]
    fault: NDArray[np.uint8]
    detail: NDArray[np.int64]
    tag_hash: NDArray[np.uint32]
    first_row: NDArray[np.int64]
    hi: NDArray[np.uint64]
    lo: NDArray[np.uint32]
    tombstone: NDArray[np.bool_]

    keys_bytes = _Column()
    records = _Column()
    flags = _Column()
    topic_id = _Column()
    partition = _Column()
    epoch = _Column()
    base_offset = _Column()
    last_offset = _Column()
    producer_id = _Column()
    producer_epoch = _Column()
    sequence = _Column()
    min_timestamp = _Column()
    max_timestamp = _Column()
    append_timestamp = _Column()

    def heads(self) -> list[Head]:
        """All batches as plain numbers, as they are now: for loops over batches, which arrays make slow."""
        columns = (self.start.tolist(), self.size.tolist(), self.fault.tolist(), self.first_row.tolist())
        return [Head(*head, *found) for head, *found in zip(self.headers.tolist(), *columns, strict=True)]

    def __len__(self) -> int:
        return len(self.start)

    def rows(self, i: int) -> slice:
        """The rows of batch i in ``hi``, ``lo`` and ``tombstone``; empty for a faulty batch."""
        first = int(self.first_row[i])
        return slice(first, first + (int(self.records[i]) if self.fault[i] == Fault.OK else 0))

    def bytes_of(self, i: int) -> memoryview:
        """The bytes of batch i."""
        start = int(self.start[i])
        return self.data.data[start : start + int(self.size[i])]


def inspect_group(
    data: NDArray[np.uint8] | Buffer, secret: NDArray[np.uint64], *, is_produce: bool = True
) -> Group:
    """Everything about the whole batches that lie one after another in ``data``; faults are in ``fault``.

    ``is_produce`` False leaves out the produce limits, which do not bind what is stored.
    """
    raw = data if isinstance(data, np.ndarray) else np.frombuffer(data, np.uint8)
    batches, rows = walking.count(raw)
    table, headers = np.empty((batches, 6), np.int64), np.empty((batches, HEADER_BYTES), np.uint8)
    hi, lo, tombstone = np.empty(rows, np.uint64), np.empty(rows, np.uint32), np.empty(rows, np.bool_)
    rows = walking.inspect(raw, secret[0], secret[1], is_produce, table, headers, hi, lo, tombstone)
    if len(hi) != rows:
        hi, lo, tombstone = hi[:rows].copy(), lo[:rows].copy(), tombstone[:rows].copy()
    fields = headers.reshape(-1).view(HEADER_DTYPE)
    group = Group(
        raw, fields, table[:, 0], table[:, 1], table[:, 2].astype(np.uint8), table[:, 3],
        table[:, 4].astype(np.uint32), table[:, 5], hi, lo, tombstone,
    )  # fmt: skip
    if _NEEDS_DECODE in (faults := group.fault.tolist()):
        for i, fault in enumerate(faults):
            if fault == _NEEDS_DECODE:
                _decode(group, i, secret, is_produce)
    return group


def _decode(group: Group, i: int, secret: NDArray[np.uint64], is_produce: bool) -> None:
    """Settle a batch with compressed columns: it is good when all of them decompress to what they declare.

    Its record rows stay in place, unused, when it is not.
    """
    try:
        columns = Batch(group.bytes_of(i)).columns
    except MalformedBatch:
        group.fault[i] = Fault.UNDECODABLE
        return
    if len(columns.headers):
        most = limits.HEADERS_BYTES_MAX if is_produce else walking.UNLIMITED
        column = np.frombuffer(columns.headers, np.uint8)
        fault, record = walking.check_headers(column, columns.records, most)
        if fault != Fault.OK:
            group.fault[i], group.detail[i] = fault, record
            return
    group.fault[i] = Fault.OK
    if group.flags[i] & 3:
        rows = group.rows(i)
        group.hi[rows], group.lo[rows] = fingerprint(
            columns.keys, columns.key_lengths, int(group.topic_id[i]), secret
        )


def stamp_group(
    data: NDArray[np.uint8] | Buffer,
    group: Group,
    base_offsets: NDArray[np.int64],
    epoch: int,
    append_ms: int,
) -> None:
    """Write base and last offset, epoch, append time and header CRC into the batches of ``data``, in place.

    *Shape*: one base offset a batch; negative: leave that batch as it is. Faulty batches are left alone.
    *Effects*: ``group``'s header fields change along.
    """
    raw = data if isinstance(data, np.ndarray) else np.frombuffer(data, np.uint8)
    if len(base_offsets) != len(group) or len(raw) != len(group.data):
        raise Invalid(f"{len(base_offsets)} base offsets for {len(group)} batches of {len(group.data)} bytes")
    bases = base_offsets
    if group.fault.any():
        bases = np.where(group.fault == Fault.OK, base_offsets, np.int64(-1))
    headers = group.headers.view(np.uint8).reshape(-1, HEADER_BYTES)
    walking.stamp(raw, headers, aligned(group.start, np.int64), bases, epoch, append_ms)


def admit_record(
    data: bytearray | memoryview,
    secret: tuple[np.uint64, np.uint64],
    base_offset: int,
    epoch: int,
    append_ms: int,
) -> tuple[int, int, bool] | None:
    """(hi, lo, tombstone) of a batch of one plain record, checked and stamped in one call.

    None, and nothing is changed, when ``data`` is anything else or has a fault: ``inspect_group`` says which.
    """
    is_good, hi, word = walking.admit_record(
        np.frombuffer(data, np.uint8), *secret, base_offset, epoch, append_ms
    )
    return (hi, word >> 1, bool(word & 1)) if is_good else None


def fault_error(group: Group, i: int) -> FirnError:
    """The error that says why batch i is refused, to be sent to the producer.

    *Errors*: returned, not raised: Invalid for a null key, LimitExceeded, else MalformedBatch.
    """
    fault, record = Fault(int(group.fault[i])), int(group.detail[i])
    where = f"batch {i}: " if len(group) > 1 else ""
    details = {"batch": i} | ({"record": record} if record >= 0 else {})
    if fault == Fault.NULL_KEY:
        return Invalid(
            f"{where}record {record}: the key is null; a key is bytes, and may be empty but not null",
            **details,
        )
    if limit := _LIMITS.get(fault):
        which = f"record {record}: " if record >= 0 else ""
        return LimitExceeded(f"{where}{which}{limit}", **details)
    return MalformedBatch(f"{where}{_sentence(group, i, fault, record)}", **details)


_LIMITS = {
    Fault.BATCH_LIMIT: f"a batch has at most {limits.BATCH_BYTES_MAX} bytes, also when decompressed,"
    f" and {limits.BATCH_RECORDS_MAX} records",
    Fault.KEY_LIMIT: f"a key has at most {limits.KEY_BYTES_MAX} bytes",
    Fault.VALUE_LIMIT: f"a value has at most {limits.VALUE_BYTES_MAX} bytes",
    Fault.TAG_LIMIT: f"a tag has at most {limits.TAG_BYTES_MAX} bytes",
    Fault.QUEUES_LIMIT: f"a record names at most {limits.QUEUES_PER_RECORD_MAX} queues, each by 1 to"
    f" {limits.QUEUE_NAME_BYTES_MAX} bytes",
    Fault.HEADERS_LIMIT: f"the headers of a record have at most {limits.HEADERS_BYTES_MAX} bytes",
}


def _sentence(group: Group, i: int, fault: Fault, record: int) -> str:
    """What ``firn.batch`` says about the batch, or what the kernel alone checks."""
    view = group.bytes_of(i)
    try:
        header = parse_header(view)
        if header.size > len(view):
            return f"batch of {header.size} bytes announced, {len(view)} there"
        batch = Batch(view[: header.size], header)
        batch.verify()
        _ = batch.columns
    except MalformedBatch as error:
        return error.message
    if fault == Fault.TEXT:
        return f"record {record}: a tag, queue name or header is not valid text (UTF-8, headers as a msgpack map)"
    which = f"record {record}: " if record >= 0 else ""
    return f"{which}header and columns contradict each other: flags, offsets, timestamps or lengths"

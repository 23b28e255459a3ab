"""From records as ``send`` got them to columns of batches: the work that is done once a chunk, not once a record.

A *chunk* is the list of records that ``send`` or ``send_many`` appended between two cuts. Cutting it finds the
faulty records, places the others on partitions, and parts each partition's rows into batches.

Invariants: the rows of a partition keep the order in which they were sent; every row is either faulty or in
exactly one batch; a chunk is complete when each row has an offset or an error.
"""

from asyncio import AbstractEventLoop, Future
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, repeat
from operator import countOf, itemgetter
from types import NoneType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from firn import limits
from firn.batch import Codec, Codecs, Columns, encode_headers, encode_queues, encode_tags
from firn.client.even import EVEN_RECORDS_MIN, ROW_BYTES, Even, even_rows
from firn.client.small import RECORDS_MAX, Part, parted
from firn.errors import FirnError, Invalid, LimitExceeded, UnknownPartition
from firn.partitioner import partitions_of, partitions_of_rows

PENDING, FAILED = -1, -2

_NONE: NDArray[np.int64] = np.empty(0, np.int64)
_NONE.flags.writeable = False
Lengths = tuple[NDArray[np.int64], NDArray[np.int64]]  # of keys, and of values: -1 is a tombstone
Row = tuple[Any, Any, Any, Any, Any, Any, Any]  # key, value, tag, timestamp, headers, queues, partition
FIELDS = 7
PLAIN_FIELDS = 2  # of a record that has a key and a value alone
_NOTHING_MORE = [None] * (FIELDS - PLAIN_FIELDS)
Fields = list[Any]  # the same seven, each as a list over the rows; None where no row was given any


class Chunk:
    """Records that were cut together, and what became of each.

    ``first`` is the ordinal of its first record among all that its producer was given: errors name records by it.
    """

    __slots__ = (
        "_waiting", "bytes", "errors", "even", "failure", "fields", "first", "is_small", "left", "lengths", "loop",
        "offsets", "partitions", "records",
    )  # fmt: skip

    def __init__(self, loop: AbstractEventLoop, first: int) -> None:
        self.loop = loop
        self.first = first
        self.fields: Fields = []
        self.lengths: Lengths | None = None  # where all records are plain: see ``plain_lengths``
        self.even: Even | None = None  # in the place of ``fields`` and ``lengths``, where all are even
        self.records = 0
        self.bytes = 0
        # Lists where few records were cut: an array costs more than it saves there.
        self.offsets: NDArray[np.int64] | list[int] = _NONE
        self.partitions: NDArray[np.int64] | list[int] = _NONE
        self.errors: dict[int, FirnError] = {}
        self.failure: FirnError | None = None  # the first of ``errors``
        self.left = -1  # rows without an outcome; -1: not cut yet
        self.is_small = False  # few plain records: see ``small``
        self._waiting: list[Future[None]] = []  # for any outcome, each of them somebody's own

    def fill(self, fields: Fields, lengths: Lengths | None = None) -> None:
        """The chunk's records, once and for all; with their ``plain_lengths`` where those are known."""
        if lengths is None and fields[PLAIN_FIELDS:] == _NOTHING_MORE:
            even = even_rows(fields[0], fields[1])
            if even is not None:
                self.fill_even(even)
                return
        self.fields = fields
        self.records = len(fields[0])
        self.lengths = lengths = lengths or plain_lengths(fields)
        self.bytes = bytes_of(fields) if lengths is None else plain_bytes(lengths)

    def fill_even(self, even: Even) -> None:
        """The chunk's records, once and for all."""
        self.even = even
        self.records = even.records
        self.bytes = even.records * even.row_bytes

    def fill_small(self, fields: Fields, size: int) -> None:
        """The chunk's records, once and for all, when ``small.small_bytes`` has cleared them: it gave ``size``."""
        self.fields = fields
        self.records = len(fields[0])
        self.bytes = size + ROW_BYTES * self.records
        self.is_small = True

    def opened(self) -> Fields:
        """The records, which the chunk lets go: from now on it holds their outcomes."""
        fields, self.fields, self.even = self.fields, [], None
        self.offsets = np.full(self.records, PENDING, np.int64)
        self.partitions = np.zeros(self.records, np.int64)
        self.left = self.records
        return fields

    def opened_small(self) -> Fields:
        """As ``opened``, of few records, all of partition 0 as yet."""
        fields, self.fields = self.fields, []
        self.offsets = [PENDING] * self.records
        self.partitions = [0] * self.records
        self.left = self.records
        return fields

    @property
    def is_complete(self) -> bool:
        return self.left == 0

    def acknowledge(self, rows: NDArray[np.int64] | Sequence[int], base_offset: int) -> None:
        offsets = self.offsets
        if isinstance(offsets, list):
            for offset, row in enumerate(rows, base_offset):
                offsets[row] = offset
        else:
            offsets[rows] = np.arange(base_offset, base_offset + len(rows))
        self._settled(len(rows))

    def fail(self, rows: Sequence[int] | NDArray[np.int64], error: FirnError) -> None:
        numbers = [int(row) for row in rows]
        for row in numbers:
            self.offsets[row] = FAILED
        self.errors.update(zip(numbers, repeat(error), strict=False))
        self.failure = self.failure or error
        self._settled(len(numbers))

    def _settled(self, count: int) -> None:
        self.left -= count
        if self._waiting:
            waiting, self._waiting = self._waiting, []
            for future in waiting:
                if not future.done():
                    future.set_result(None)

    async def wait(self, row: int) -> tuple[int, int]:
        """Partition and offset of a row, once it is acknowledged. Errors: what the row failed with."""
        while self.left < 0 or self.offsets[row] == PENDING:
            await self._change()
        if (error := self.errors.get(row)) is not None:
            raise error
        return int(self.partitions[row]), int(self.offsets[row])

    async def wait_all(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Partitions and offsets of all rows. Errors: the first failure."""
        while self.left != 0:
            await self._change()
        if self.failure is not None:
            raise self.failure
        return np.asarray(self.partitions, np.int64), np.asarray(self.offsets, np.int64)

    def _change(self) -> "Future[None]":
        """Done after the next outcome."""
        found: Future[None] = self.loop.create_future()
        self._waiting.append(found)
        return found


class Sent(tuple[Chunk, int]):
    """A record on its way: awaiting it gives ``(partition, offset)`` or raises what it failed with."""

    __slots__ = ()

    def __await__(self) -> Generator[Any, None, tuple[int, int]]:
        return self[0].wait(self[1]).__await__()


class SentMany:
    """Records of one ``send_many``: awaiting it gives two arrays, partitions and offsets."""

    __slots__ = ("_chunks",)

    def __init__(self, chunks: Sequence[Chunk]) -> None:
        self._chunks = chunks

    def __await__(self) -> Generator[Any, None, tuple[NDArray[np.int64], NDArray[np.int64]]]:
        return self._wait().__await__()

    async def _wait(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        found = [await chunk.wait_all() for chunk in self._chunks]
        if not found:
            return np.empty(0, np.int64), np.empty(0, np.int64)
        return np.concatenate([p for p, _ in found]), np.concatenate([o for _, o in found])


def fields_of(flat: list[Any], width: int = FIELDS) -> Fields:
    """The seven lists of rows of which ``width`` fields lie behind one another in one list."""
    if width == PLAIN_FIELDS:
        return [flat[::PLAIN_FIELDS], flat[1::PLAIN_FIELDS], *_NOTHING_MORE]
    return [flat[at::width] for at in range(width)] + [None] * (FIELDS - width)


def _full(fields: Fields) -> list[list[Any]]:
    """The fields with a list in the place of each None."""
    return [[None] * len(fields[0]) if column is None else column for column in fields]


def bytes_of(fields: Fields) -> int:
    """About how many bytes the records will take; what is not well formed counts for little."""
    keys, values = fields[:2]
    total = sum(len(x) for column in (keys, values) for x in column if isinstance(x, _BYTES))
    return total + ROW_BYTES * len(keys)


def plain_lengths(fields: Fields) -> Lengths | None:
    """The lengths of records that need no further look: keys and values are ``bytes`` within the limits, values
    perhaps None, and nothing else is given. None where a record may be otherwise.
    """
    keys, values, *extras = fields
    if countOf(map(type, keys), bytes) != len(keys):
        return None
    try:
        if not all(column is None or _none(column) for column in extras):
            return None
    except Exception:  # a field that will not even be compared: a NumPy array's is an array
        return None
    has_tombstones = (plain := countOf(map(type, values), bytes)) != len(values)
    if has_tombstones and plain + countOf(map(type, values), NoneType) != len(values):
        return None
    lengths = _lengths(keys, values, has_tombstones=has_tombstones)
    is_small = lengths[0].max() <= limits.KEY_BYTES_MAX and lengths[1].max() <= limits.VALUE_BYTES_MAX
    return lengths if is_small else None


def _lengths(keys: Sequence[bytes], values: Sequence[bytes | None], *, has_tombstones: bool) -> Lengths:
    if not has_tombstones:
        return _lengths_of(keys), _lengths_of(values)  # type: ignore[arg-type]
    return _lengths_of(keys), np.fromiter(
        (-1 if v is None else len(v) for v in values), np.int64, len(values)
    )


def _lengths_of(column: Sequence[bytes]) -> NDArray[np.int64]:
    """The length of each; where it is the same for all, counting those costs half of gathering them."""
    n = len(column)
    if n and countOf(map(len, column), width := len(column[0])) == n:
        return np.full(n, width, np.int64)
    return np.array(list(map(len, column)), np.int64)


def plain_bytes(lengths: Lengths) -> int:
    """How many bytes the records will take."""
    return int(_row_bytes(lengths).sum())


def _row_bytes(lengths: Lengths) -> NDArray[np.int64]:
    """Bytes of each row in a batch, without tag, headers and queues."""
    return lengths[0] + np.maximum(lengths[1], 0) + ROW_BYTES


@dataclass(frozen=True, slots=True)
class Cut:
    """The columns of one batch-to-be, and which rows of the chunk they are."""

    partition: int
    columns: Columns | Even
    rows: NDArray[np.int64]


def cut(
    chunk: Chunk, partitions: int, *, batch_bytes: int, now_ms: int, is_plain: bool = False
) -> list[Cut | Part]:
    """The batches of a chunk; rows that may not be sent have failed on return, the others go on.

    *Shape*: per partition in the order sent; every batch within ``batch_bytes`` where one record is. With
    ``is_plain``, when nothing is to be compressed, even records stay so, and those of few plain records are ``Part``:
    a chunk may fall into a hundred thousand of them.
    *Effects*: the chunk is opened, and its rows are let go.
    """
    if chunk.even is not None:
        even = chunk.even.stamped(now_ms)
        chunk.opened()
        return _cut_even(even, chunk, partitions, batch_bytes, is_plain=is_plain)
    fields = chunk.opened()
    numbers = np.arange(chunk.records, dtype=np.int64)
    lengths, chunk.lengths = chunk.lengths, None
    if lengths is not None:
        keys, values = fields[:2]
        placed = partitions_of(keys, partitions, lengths[0])
        chunk.partitions = placed
        few = RECORDS_MAX if is_plain else 0
        lists = Lists(keys, values, *lengths, now_ms)
        return _part(lists, placed, numbers, partitions, batch_bytes, few=few)
    fields = _full(fields)
    if faults := faults_of(fields, partitions, chunk.first):
        for row, error in faults.items():
            chunk.fail([row], error)
        numbers = np.array([i for i in range(chunk.records) if i not in faults], np.int64)
        fields = [_take(column, numbers) for column in fields]
        if not len(numbers):
            return []
    keys, values, tags, stamps, headers, queues, wanted = fields
    stamp: Any = now_ms if _none(stamps) else [now_ms if s is None else s for s in stamps]
    lengths = _lengths(keys, values, has_tombstones=True)
    lists = Lists(keys, values, *lengths, stamp, _or_none(tags), _or_none(headers), _queues(queues))
    placed = partitions_of(keys, partitions)
    if not _none(wanted):
        for at, partition in enumerate(wanted):
            if partition is not None:
                placed[at] = partition
    chunk.partitions = np.zeros(chunk.records, np.int64)
    chunk.partitions[numbers] = placed
    return _part(lists, placed, numbers, partitions, batch_bytes)


def _cut_even(
    even: Even, chunk: Chunk, partitions: int, batch_bytes: int, *, is_plain: bool
) -> list[Cut | Part]:
    placed = np.zeros(even.records, np.int64)
    rows = np.arange(even.records, dtype=np.int64)
    if partitions > 1:
        placed = partitions_of_rows(even.key_matrix(), partitions)
        narrow = placed.astype(np.uint16) if partitions <= 1 << 16 else placed  # is sorted by its digits
        rows = np.argsort(narrow, kind="stable")
        even = even.take(rows)
    chunk.partitions = placed
    in_order = placed[rows]
    ends = (np.flatnonzero(np.diff(in_order)) + 1).tolist()
    most = max(1, min(batch_bytes // even.row_bytes, limits.BATCH_RECORDS_MAX))
    found: list[Cut | Part] = []
    for start, end in pairwise([0, *ends, even.records]):
        partition = int(in_order[start])
        for at in range(start, end, most):
            upto = min(at + most, end)
            part = even.slice(at, upto)
            if is_plain and part.records < EVEN_RECORDS_MIN:
                found.append((partition, rows[at:upto], *part.lists()))
            else:
                found.append(Cut(partition, part if is_plain else part.columns(), rows[at:upto]))
    return found


def cut_small(chunk: Chunk, partitions: int) -> list[Part]:
    """As ``cut``, for a chunk that is small: one batch a partition. *Effects*: the same."""
    keys, values = chunk.opened_small()[:2]
    parts = parted(keys, values, partitions)
    for partition, rows, _, _ in parts:
        if partition:
            for row in rows:
                chunk.partitions[row] = partition
    return parts


@dataclass(slots=True)
class Lists:
    """Well formed records as lists; ``timestamps`` may be one for all, the optional columns absent."""

    keys: list[bytes]
    values: list[bytes | None]
    key_lengths: NDArray[np.int64]
    value_lengths: NDArray[np.int64]
    timestamps: list[int] | int
    tags: list[str | None] | None = None
    headers: list[Mapping[str, str] | None] | None = None
    queues: list[Sequence[str]] | None = None

    def take(self, order: NDArray[np.int64]) -> "Lists":
        return Lists(*(self._taken(column, order) for column in self._all()))

    @staticmethod
    def _taken(column: Any, order: NDArray[np.int64]) -> Any:
        if isinstance(column, np.ndarray):
            return column[order]
        return _take(column, order) if isinstance(column, list) else column

    def slice(self, start: int, end: int) -> "Lists":
        if start == 0 and end == len(self.keys):
            return self
        parts: list[Any] = [c[start:end] if isinstance(c, list | np.ndarray) else c for c in self._all()]
        return Lists(*parts)

    def _all(self) -> tuple[Any, ...]:
        return (
            self.keys, self.values, self.key_lengths, self.value_lengths, self.timestamps, self.tags, self.headers,
            self.queues,
        )  # fmt: skip

    def columns(self) -> Columns:
        """What ``columns_of`` gives, from the lengths that are known."""
        n = len(self.keys)
        values: Any = filter(None, self.values) if self.value_lengths.min() < 0 else self.values
        one = isinstance(self.timestamps, int)
        return Columns(
            key_lengths=self.key_lengths.astype("<i4"),
            value_lengths=self.value_lengths.astype("<i4"),
            timestamps=np.full(n, self.timestamps, "<i8") if one else np.asarray(self.timestamps, "<i8"),
            offsets=np.arange(n, dtype=np.int64),
            keys=np.frombuffer(b"".join(self.keys), np.uint8),
            values=np.frombuffer(b"".join(values), np.uint8),
            tags=encode_tags(self.tags),
            queues=encode_queues(self.queues),
            headers=encode_headers(self.headers),
        )

    def sizes(self) -> NDArray[np.int64]:
        """Bytes of each row in a batch."""
        n = len(self.keys)
        sizes = _row_bytes((self.key_lengths, self.value_lengths))
        if self.tags:
            sizes += np.fromiter((4 + len(t or "") * 4 for t in self.tags), np.int64, n)
        if self.headers:
            sizes += np.fromiter((_headers_bytes(h) for h in self.headers), np.int64, n)
        if self.queues:
            sizes += np.fromiter(
                (2 + sum(2 + 4 * len(q) for q in names) for names in self.queues), np.int64, n
            )
        return sizes


def _part(
    lists: Lists, placed: NDArray[np.int64], numbers: NDArray[np.int64], partitions: int, batch_bytes: int,
    *, few: int = 0,
) -> list[Cut | Part]:  # fmt: skip
    if partitions > 1 and len(placed) and (placed != placed[0]).any():
        order = np.argsort(placed, kind="stable")
        lists, placed, numbers = lists.take(order), placed[order], numbers[order]
    ends = np.flatnonzero(np.diff(placed)) + 1
    found: list[Cut | Part] = []
    sums = np.concatenate(([0], np.cumsum(lists.sizes())))
    for start, end in zip([0, *ends.tolist()], [*ends.tolist(), len(placed)], strict=True):
        if end - start <= few and sums[end] - sums[start] <= batch_bytes:
            keys, values = lists.keys[start:end], lists.values[start:end]
            found.append((int(placed[start]), numbers[start:end], keys, values))
            continue
        at = start
        while at < end:
            upto = int(np.searchsorted(sums, sums[at] + batch_bytes, side="right")) - 1
            upto = min(max(upto, at + 1), end, at + limits.BATCH_RECORDS_MAX)
            found.append(Cut(int(placed[at]), lists.slice(at, upto).columns(), numbers[at:upto]))
            at = upto
    return found


def codecs(name: str) -> Codecs:
    """The codecs of a producer's ``compression``. Errors: Invalid."""
    known = {"none": Codec.NONE, "lz4": Codec.LZ4, "zstd": Codec.ZSTD}
    if name not in known:
        raise Invalid(f"compression {name!r}: expected one of {', '.join(known)}")
    return Codecs(known[name], known[name], known[name])


def _none(column: list[Any]) -> bool:
    return column.count(None) == len(column)


def _or_none(column: list[Any]) -> Any:
    return None if _none(column) else column


def _queues(column: list[Any]) -> Any:
    return None if _none(column) else [names or () for names in column]


def _take(column: list[Any], order: NDArray[np.int64]) -> list[Any]:
    if len(order) == 0:
        return []
    if len(order) == 1:
        return [column[int(order[0])]]
    return list(itemgetter(*order.tolist())(column))


def _headers_bytes(headers: Mapping[str, str] | None) -> int:
    return 4 + (sum(10 + 4 * (len(k) + len(v)) for k, v in headers.items()) if headers else 0)


_BYTES = (bytes, bytearray, memoryview)


def faults_of(fields: Fields, partitions: int, first: int) -> dict[int, FirnError]:
    """The rows that may not be sent, with why: a look at each row, for what ``plain_lengths`` could not clear.

    *Effects*: keys and values that are other buffers than bytes are replaced by their bytes of this moment.
    """
    keys, values = fields[:2]
    found = {}
    for row, record in enumerate(zip(*_full(fields), strict=True)):
        error = fault_of(record, partitions, f"record {first + row}")
        if error is not None:
            found[row] = error
            continue
        for column in (keys, values):
            if type(raw := column[row]) is not bytes and raw is not None:
                column[row] = bytes(raw)
    return found


def fault_of(record: Row, partitions: int, name: str) -> FirnError | None:
    """Why a record may not be sent, or None. ``name`` is how the message calls it."""
    key, value, tag, stamp, headers, queues, partition = record
    if not isinstance(key, _BYTES):
        return Invalid(f"{name}: the key is {key!r}; a key is bytes, and may be empty but not null")
    if value is not None and not isinstance(value, _BYTES):
        return Invalid(
            f"{name}: the value is a {type(value).__name__}; a value is bytes, or None for a tombstone"
        )
    if memoryview(key).nbytes > limits.KEY_BYTES_MAX:
        return LimitExceeded(
            f"{name}: a key of {memoryview(key).nbytes} bytes; at most {limits.KEY_BYTES_MAX}"
        )
    if value is not None and memoryview(value).nbytes > limits.VALUE_BYTES_MAX:
        return LimitExceeded(
            f"{name}: a value of {memoryview(value).nbytes} bytes; at most {limits.VALUE_BYTES_MAX}"
        )
    if partition is not None and not _is_int(partition):
        return Invalid(f"{name}: partition: expected a number, found {partition!r}")
    if partition is not None and not 0 <= partition < partitions:
        return UnknownPartition(f"{name}: partition {partition}: the topic has {partitions}")
    if stamp is not None and not (_is_int(stamp) and -(1 << 63) <= stamp < 1 << 63):
        return Invalid(f"{name}: timestamp: expected ms since 1970, found {stamp!r}")
    return _fault_of_extras(tag, headers, queues, name)


def _is_int(value: object) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _fault_of_extras(tag: Any, headers: Any, queues: Any, name: str) -> FirnError | None:
    if tag is not None and not isinstance(tag, str):
        return Invalid(f"{name}: tag: expected a string, found {tag!r}")
    if tag is not None and _utf8(tag) is None:
        return Invalid(f"{name}: tag {tag!r} is not valid Unicode")
    if tag is not None and (size := len(tag.encode())) > limits.TAG_BYTES_MAX:
        return LimitExceeded(f"{name}: a tag of {size} bytes; at most {limits.TAG_BYTES_MAX}")
    if headers is not None:
        if not isinstance(headers, Mapping) or not all(
            isinstance(x, str) and _utf8(x) is not None for pair in headers.items() for x in pair
        ):
            return Invalid(f"{name}: headers: expected a mapping of strings to strings, found {headers!r}")
        if sum(10 + len(k.encode()) + len(v.encode()) for k, v in headers.items()) > limits.HEADERS_BYTES_MAX:
            return LimitExceeded(f"{name}: headers of more than {limits.HEADERS_BYTES_MAX} bytes")
    if queues is not None:
        if isinstance(queues, str | bytes) or not isinstance(queues, Sequence):
            return Invalid(f"{name}: queues: expected a list of names, found {queues!r}")
        if len(queues) > limits.QUEUES_PER_RECORD_MAX:
            return LimitExceeded(f"{name}: {len(queues)} queues; at most {limits.QUEUES_PER_RECORD_MAX}")
        for queue in queues:
            raw = _utf8(queue) if isinstance(queue, str) else None
            if not raw or len(raw) > limits.QUEUE_NAME_BYTES_MAX:
                return Invalid(
                    f"{name}: queue name {queue!r}: expected 1 to {limits.QUEUE_NAME_BYTES_MAX} bytes"
                )
    return None


def _utf8(text: str) -> bytes | None:
    try:
        return text.encode()
    except UnicodeEncodeError:
        return None

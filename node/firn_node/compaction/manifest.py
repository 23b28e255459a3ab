"""The manifest of one partition's compacted log: what it does not name does not exist.

File ``MANIFEST``, little-endian:

====== ==== ======= ============================================================
offset type field   note
====== ==== ======= ============================================================
0      u32  magic   0x4D4E5246, the bytes ``FRNM``
4      u16  version 1
6      u16  zero    0
8      u32  size    of the body in bytes
12     u32  crc     CRC-32C of bytes 0..12 and the body
16     --   body    one msgpack map, the fields of ``Manifest`` by name
====== ==== ======= ============================================================

It is replaced whole: temporary name, fsync, rename, fsync of the folder. A swap of any number of files is one
rename.

Invariants (each a named predicate below, run at every swap and at every load):

- the horizon, ``tombstone_floor``, the generation and the file numbers never fall;
- clean segments ascend, do not overlap, end at or below the horizon, and no file has two roles;
- sealed dirty segments ascend without overlap and end above the horizon;
- cover times ascend in horizon and in time, and none is above the horizon;
- a mask has as many masked rows as the manifest says, at least one, and no more than the segment has.
"""

import itertools
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from typing import Any

import msgpack

from firn.crc import crc32c
from firn.errors import Corrupt, InvariantBroken

MAGIC = 0x4D4E5246
VERSION = 1
HEAD_BYTES = 16
FILE_NAME = "MANIFEST"
ROWS_MAX = 1 << 31
SPAN_MAX = 1 << 32


@dataclass(frozen=True, slots=True, kw_only=True)
class CleanSegment:
    """A segment that a compaction wrote. Offsets of its rows lie in ``[start, end)``; row = ordinal in the file."""

    name: str
    start: int
    end: int
    rows: int
    tombstones: int
    bytes: int  # of its batches: the file is longer by indexes and footer
    batches: int
    mask: str | None = None  # file of masked rows
    masked: int = 0
    masked_since_ms: int | None = None  # when the oldest of its masked rows was masked
    keys: str | None = None  # a key index that was rebuilt, in place of the damaged one in ``name``


@dataclass(frozen=True, slots=True, kw_only=True)
class DirtySegment:
    """The key index of a sealed dirty range ``[start, end)``; row = offset - start, dense."""

    name: str
    start: int
    end: int
    bytes: int  # of its batches in the commit log
    max_append_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    topic_id: int
    partition: int
    generation: int = 0
    horizon: int = 0  # the first dirty offset
    tombstone_floor: int = 0  # highest tombstone masked because its time was over, plus 1
    next_file: int = 1
    cover_times: tuple[
        tuple[int, int], ...
    ] = ()  # (horizon, ms): pairs that still have tombstones in their time
    segments: tuple[CleanSegment, ...] = ()
    dirty: tuple[DirtySegment, ...] = ()

    def files(self) -> set[str]:
        """The names of all files that exist."""
        found = {s.name for s in self.segments} | {d.name for d in self.dirty}
        found |= {s.mask for s in self.segments if s.mask is not None}
        return found | {s.keys for s in self.segments if s.keys is not None}

    @property
    def clean_bytes(self) -> int:
        return sum(s.bytes for s in self.segments)

    @property
    def rows(self) -> int:
        return sum(s.rows for s in self.segments)

    @property
    def masked(self) -> int:
        return sum(s.masked for s in self.segments)

    def encode(self) -> bytes:
        body: bytes = msgpack.packb(asdict(self))
        head = (
            MAGIC.to_bytes(4, "little")
            + VERSION.to_bytes(2, "little")
            + bytes(2)
            + len(body).to_bytes(4, "little")
        )
        return head + crc32c(head + body).to_bytes(4, "little") + body


def decode(data: bytes, *, file: str) -> Manifest:
    """The manifest that these bytes hold.

    *Errors*: Corrupt, naming the file, the byte, what was expected and what was found.
    """

    def fault(position: int, expected: object, found: object) -> Corrupt:
        return Corrupt(
            f"{file} at byte {position}: expected {expected}, found {found}",
            file=file, position=position, expected=str(expected), found=str(found),
        )  # fmt: skip

    if len(data) < HEAD_BYTES:
        raise fault(0, f"{HEAD_BYTES} bytes", len(data))
    for at, width, expected in ((0, 4, MAGIC), (4, 2, VERSION), (8, 4, len(data) - HEAD_BYTES)):
        found = int.from_bytes(data[at : at + width], "little")
        if found != expected:
            raise fault(at, expected, found)
    crc = int.from_bytes(data[12:16], "little")
    if (found := crc32c(data[:12] + data[16:])) != crc:
        raise fault(12, f"CRC {crc:#010x}", f"{found:#010x}")
    try:
        return _parse(msgpack.unpackb(data[HEAD_BYTES:]))
    except (ValueError, TypeError, KeyError) as error:
        raise fault(HEAD_BYTES, "the manifest's fields", error) from error


def _parse(document: dict[str, Any]) -> Manifest:
    names = {f.name for f in fields(Manifest)}
    if set(document) != names:
        raise ValueError(f"fields {sorted(set(document) ^ names)} are missing or unknown")
    document["segments"] = tuple(CleanSegment(**s) for s in document["segments"])
    document["dirty"] = tuple(DirtySegment(**d) for d in document["dirty"])
    document["cover_times"] = tuple((int(h), int(t)) for h, t in document["cover_times"])
    return Manifest(**document)


def nothing_falls(old: Manifest, new: Manifest) -> bool:
    return (
        new.generation == old.generation + 1
        and new.horizon >= old.horizon
        and new.tombstone_floor >= old.tombstone_floor
        and new.next_file >= old.next_file
        and (new.topic_id, new.partition) == (old.topic_id, old.partition)
    )


def clean_segments_ascend(_: Manifest, new: Manifest) -> bool:
    at = 0
    for s in new.segments:
        if not at <= s.start < s.end <= new.horizon or s.end - s.start > SPAN_MAX:
            return False
        at = s.end
    return True


def dirty_segments_ascend_above_the_horizon(_: Manifest, new: Manifest) -> bool:
    at = 0
    for d in new.dirty:
        if not at <= d.start < d.end or d.end <= new.horizon:
            return False
        at = d.end
    return True


def cover_times_ascend(_: Manifest, new: Manifest) -> bool:
    pairs = new.cover_times
    return all(a[0] < b[0] and a[1] <= b[1] for a, b in itertools.pairwise(pairs)) and (
        not pairs or pairs[-1][0] <= new.horizon
    )


def counts_fit(_: Manifest, new: Manifest) -> bool:
    return all(
        1 <= s.rows <= min(ROWS_MAX, s.end - s.start)
        and 0 <= s.tombstones <= s.rows
        and (s.mask is None) == (s.masked == 0) == (s.masked_since_ms is None)
        and 0 <= s.masked <= s.rows
        for s in new.segments
    )


def no_file_has_two_roles(_: Manifest, new: Manifest) -> bool:
    roles = [s.name for s in new.segments] + [d.name for d in new.dirty]
    roles += [name for s in new.segments for name in (s.mask, s.keys) if name is not None]
    return len(roles) == len(set(roles))


PREDICATES: tuple[Callable[[Manifest, Manifest], bool], ...] = (
    clean_segments_ascend,
    dirty_segments_ascend_above_the_horizon,
    cover_times_ascend,
    counts_fit,
    no_file_has_two_roles,
)


def check_swap(old: Manifest, new: Manifest) -> None:
    """*Errors*: InvariantBroken, naming the predicate that does not hold."""
    for predicate in (nothing_falls, *PREDICATES):
        if not predicate(old, new):
            raise InvariantBroken(
                f"manifest of topic {new.topic_id} partition {new.partition}, generation {new.generation}: "
                f"{predicate.__name__} does not hold"
            )


def check_loaded(found: Manifest, *, file: str, topic_id: int, partition: int) -> None:
    """*Errors*: Corrupt, naming the predicate or the identity that does not hold."""
    if (found.topic_id, found.partition) != (topic_id, partition):
        raise Corrupt(
            f"{file}: expected topic {topic_id} partition {partition}, "
            f"found topic {found.topic_id} partition {found.partition}",
            file=file,
        )
    for predicate in PREDICATES:
        if not predicate(found, found):
            raise Corrupt(f"{file}: {predicate.__name__} does not hold", file=file)

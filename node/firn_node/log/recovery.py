"""Opening the commit log: which bytes count, which are cut, and which are damage.

The newest slot of all head pages (``headpage``) tells ``durable_end`` and ``log_start``; the index's
checkpoint (``verify_from``) vouches for what lies below it, because nothing derived is durable ahead of the
log. So the bytes below ``sure = max(durable_end, verify_from)`` were durable once, and the others may be torn:

=============================================== ==========================================================
found                                           done
=============================================== ==========================================================
no segment file                                 a new log at ``create_at``
a segment below ``log_start``                   removed: retention had let go of it
no segment at ``log_start``, a gap below sure   Corrupt
last segment: no valid slot, one is damaged     Corrupt: durable_end may be lost with it
newest slot is a marker, no damaged one by it   cut at its end, whatever follows
bad batch, or gap, at or above ``sure``         torn tail: cut there, whatever follows
bad batch, or gap, in [first, sure)             Corrupt: names file, position, expected and found
log ends below ``sure``                         Corrupt
=============================================== ==========================================================

``first = min(verify_from, end of the newest slot)``: the append times of batches behind that end are theirs alone
to tell, and the log clock must not start below one of them.

After a failed fsync the kernel may hold bytes as clean that never reached the disk, and a restarted process
reads them. So the bytes from ``sure`` on that are kept are written again, in place, before they are synced.

Repair, each step durable before the next, all of it repeatable:
1. unlink segments above the cut, and what was derived from the segment that is cut; sync the folder
2. cut the last segment; write the kept bytes above ``sure`` again; sync the files
3. write a marker slot; sync
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from firn.batch import HEADER_BYTES, Batch, Buffer, parse_header
from firn.errors import Corrupt, MalformedBatch
from firn_node import failpoints
from firn_node.disk import Disk
from firn_node.log.headpage import HEAD_BYTES, HeadPage, Slot, first_page, read_page, write_slot
from firn_node.log.segment import drop_derived, parse_name, segment_path
from firn_node.log.walk import announced_size, headers, sound_bytes

CHUNK = 4 << 20

# Given bytes that begin with a batch: how many bytes of whole, sound batches they begin with, and what is
# wrong with the next one; None when it merely runs on past the end of the bytes.
Check = Callable[[Buffer], tuple[int, str | None]]


def check_batches(data: Buffer) -> tuple[int, str | None]:
    """The ``Check`` in force: structure of each header and all three CRCs.

    A kernel runs over what is sound; Python looks at the first batch that is not, and says why.
    """
    view, at = memoryview(data), sound_bytes(data)
    while len(data) - at >= HEADER_BYTES:
        try:
            header = parse_header(view, at)
            if at + header.size > len(data):
                return at, None
            Batch(view[at : at + header.size], header).verify()
        except MalformedBatch as error:
            return at, error.message
        at += header.size
    return at, None


@dataclass(frozen=True, slots=True)
class Recovered:
    """An opened log: all of ``[starts[0], end)`` is durable."""

    starts: tuple[int, ...]  # of the segments; the last is the active one
    end: int
    counter: int  # of the newest slot
    append_ms: int


@dataclass(frozen=True, slots=True)
class _Piece:
    """A segment file as found: positions ``[start, limit)`` may hold batches."""

    start: int
    path: str
    limit: int


def recover(disk: Disk, folder: str, *, verify_from: int, create_at: int, check: Check) -> Recovered:
    """What is left of the log, repaired. *Effects*: durable on return; may be repeated after a crash.

    Errors: Corrupt (rebuild from a peer); OSError.
    """
    starts = _segment_starts(disk, folder)
    if not starts:
        if verify_from > create_at:
            raise _lost(folder, create_at, create_at, verify_from)
        return _create(disk, folder, create_at)
    pages = {start: read_page(disk, segment_path(folder, start), start) for start in starts}
    newest = _newest_slot(folder, starts, {start: page for start, (page, _) in pages.items()})
    if newest is None:
        return _create_again(disk, folder, starts, verify_from)
    if newest.end == newest.log_start:  # made or moved by a process that died before the name was durable
        disk.sync_folder(folder)
    starts = _without_expired(disk, folder, starts, newest.log_start)
    ends = dict(zip(starts, (*starts[1:], starts[-1] + pages[starts[-1]][1]), strict=True))
    sure = max(newest.durable_end, verify_from)
    marked = newest.is_marker and not pages[newest.start][0].is_damaged
    limit = newest.end if marked else max(ends.values())
    if limit < sure:
        raise _lost(folder, starts[-1], limit, sure)
    pieces = [_Piece(s, segment_path(folder, s), min(ends[s], limit)) for s in starts if s < limit]
    _check_extents(pieces, {s: size for s, (_, size) in pages.items()}, sure)
    first = max(min(verify_from, newest.end), starts[0])
    end, append_ms = _verify(disk, pieces, first, sure, check)
    kept = tuple(s for s in starts if s < end) or starts[:1]
    found = Recovered(kept, end, newest.counter, max(newest.append_ms, append_ms))
    if marked and end == limit == newest.end and kept == starts and pages[kept[-1]][1] == end - kept[-1]:
        return found
    return _repair(disk, folder, found, dropped=starts[len(kept) :], log_start=newest.log_start, sure=sure)


def _segment_starts(disk: Disk, folder: str) -> tuple[int, ...]:
    """Start positions of the segment files, ascending. *Effects*: files of no segment are removed."""
    names = disk.list(folder)
    starts = tuple(sorted(found[0] for name in names if (found := parse_name(name)) and found[1] == "log"))
    for name in names:
        found = parse_name(name)
        if name.endswith(".tmp") or (found is not None and found[0] not in starts):
            disk.unlink(os.path.join(folder, name))
    return starts


def _newest_slot(folder: str, starts: Sequence[int], pages: dict[int, HeadPage]) -> Slot | None:
    last = pages[starts[-1]]
    if last.newest is None and last.is_damaged:
        path = segment_path(folder, starts[-1])
        raise Corrupt(
            f"{path} at byte 0: expected a head page with a valid slot, found two damaged ones",
            file=path,
            position=starts[-1],
        )
    slots = [page.newest for page in pages.values() if page.newest is not None]
    return max(slots, key=lambda slot: slot.counter, default=None)


def _create(disk: Disk, folder: str, start: int) -> Recovered:
    """A new log of one empty segment. *Effects*: durable on return."""
    disk.make_folder(folder)
    path = segment_path(folder, start)
    disk.unlink(path)
    file = disk.open(path, "create")
    try:
        file.pwrite([first_page(Slot(1, start, start, start, start, 0))], 0)
        file.sync()
    finally:
        file.close()
    failpoints.step("log.create.written")
    disk.sync_folder(folder)
    return Recovered((start,), start, 1, 0)


def _create_again(disk: Disk, folder: str, starts: Sequence[int], verify_from: int) -> Recovered:
    """The crash hit the creation of the log: one file, nothing of which was ever synced."""
    if len(starts) > 1 or verify_from > starts[0]:
        raise _lost(folder, starts[0], starts[0], max(verify_from, starts[-1]))
    return _create(disk, folder, starts[0])


def _without_expired(disk: Disk, folder: str, starts: tuple[int, ...], log_start: int) -> tuple[int, ...]:
    for start in starts:
        if start < log_start:
            disk.unlink(segment_path(folder, start))
            drop_derived(disk, folder, start)
    kept = tuple(s for s in starts if s >= log_start)
    if not kept or kept[0] != log_start:
        path = segment_path(folder, log_start)
        found = segment_path(folder, kept[0]) if kept else "no later segment"
        raise Corrupt(
            f"{path}: expected the first segment of the log, found {found}", file=path, position=log_start
        )
    return kept


def _lost(folder: str, start: int, end: int, sure: int) -> Corrupt:
    path = segment_path(folder, start)
    return Corrupt(
        f"{path} at position {end}: expected durable batches up to position {sure}, found the end of the log",
        file=path, position=end,
    )  # fmt: skip


def _check_extents(pieces: Sequence[_Piece], room: dict[int, int], sure: int) -> None:
    """Every segment below ``sure`` must reach the next one, also where nothing else is verified."""
    for piece in pieces:
        wanted = min(piece.limit, sure) - piece.start
        if room[piece.start] < wanted:
            at = piece.start + room[piece.start]
            found = f"expected {wanted} bytes of batches, found {room[piece.start]}"
            raise Corrupt(f"{piece.path} at position {at}: {found}", file=piece.path, position=at)


def _verify(disk: Disk, pieces: Sequence[_Piece], start: int, sure: int, check: Check) -> tuple[int, int]:
    """Where the sound batches from ``start`` on end, and their newest append time (0: none)."""
    at, append_ms = start, 0
    for piece in pieces:
        if piece.limit <= at:
            continue
        at, append_ms, fault = _verify_piece(disk, piece, max(at, piece.start), append_ms, check)
        if fault is not None:
            if at < sure:
                raise Corrupt(f"{piece.path} at position {at}: {fault}", file=piece.path, position=at)
            return at, append_ms
    return at, append_ms


def _verify_piece(
    disk: Disk, piece: _Piece, at: int, append_ms: int, check: Check
) -> tuple[int, int, str | None]:
    """Where the sound batches of one segment end, and what is wrong there; None at the segment's end."""
    file, want = disk.open(piece.path), CHUNK
    try:
        while at < piece.limit:
            data = file.pread(min(want, piece.limit - at), HEAD_BYTES + at - piece.start)
            good, fault = check(data)
            if good:
                append_ms = max(append_ms, int(headers(data[:good]).append_ms.max()))
            at += good
            if fault is not None:
                return at, append_ms, fault
            if good:
                want = CHUNK
            elif len(data) < want:
                wanted = announced_size(data) or HEADER_BYTES
                return (
                    at,
                    append_ms,
                    f"expected a batch of {wanted} bytes, found {len(data)} before the segment's end",
                )
            else:
                want = max(2 * want, announced_size(data) or 0)
        return at, append_ms, None
    finally:
        file.close()


def _repair(
    disk: Disk, folder: str, found: Recovered, *, dropped: Sequence[int], log_start: int, sure: int
) -> Recovered:
    """See the module's head for the steps."""
    last, end = found.starts[-1], found.end
    for start in reversed(dropped):
        disk.unlink(segment_path(folder, start))
        drop_derived(disk, folder, start)
        failpoints.step("log.recover.unlinked")
    drop_derived(disk, folder, last)
    disk.sync_folder(folder)
    failpoints.step("log.recover.dropped")
    for start, limit in zip(found.starts, (*found.starts[1:], end), strict=True):
        if start == last or limit > sure:
            _rewrite(disk, segment_path(folder, start), start, max(sure, start), limit, is_last=start == last)
    failpoints.step("log.recover.rewritten")
    counter = found.counter + 1
    file = disk.open(segment_path(folder, last), "write")
    try:
        write_slot(file, Slot(counter, last, log_start, end, end, found.append_ms))
        file.sync()
    finally:
        file.close()
    failpoints.step("log.recover.marked")
    return Recovered(found.starts, end, counter, found.append_ms)


def _rewrite(disk: Disk, path: str, segment_start: int, start: int, end: int, *, is_last: bool) -> None:
    """Cut a last segment at ``end``, make ``[start, end)`` dirty again and sync it."""
    file = disk.open(path, "write")
    try:
        if is_last:
            file.truncate(HEAD_BYTES + end - segment_start)
        for at in range(start, end, CHUNK):
            byte = HEAD_BYTES + at - segment_start
            file.pwrite([file.pread(min(CHUNK, end - at), byte)], byte)
        file.sync()
    finally:
        file.close()

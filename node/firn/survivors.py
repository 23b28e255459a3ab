"""Which records survive a compaction: the one rule, as one pure function.

The broker's kernels and the Spark job decide the same thing on sorted fingerprints; property tests hold both to
this function. Source: the design's storage chapter, section 8.

- Of every key the record with the greatest offset survives, the others are superseded.
- A surviving tombstone whose time is over goes too. Time is counted from the compaction that first covered an
  offset, so the tombstones that are over are exactly those below one offset, ``tombstones_end``.
"""

from collections.abc import Iterable


def survivors(rows: Iterable[tuple[int, bytes, bool]], *, tombstones_end: int = 0) -> list[int]:
    """The offsets of the records that survive.

    *Shape*: ``rows`` are (offset, key, is_tombstone) of one partition in any order, each offset once. Ascending
    offsets come back. Tombstones in ``[0, tombstones_end)`` are over.
    """
    newest: dict[bytes, tuple[int, bool]] = {}
    for offset, key, is_tombstone in rows:
        found = newest.get(key)
        if found is None or found[0] < offset:
            newest[key] = (offset, is_tombstone)
    return sorted(o for o, is_tombstone in newest.values() if not (is_tombstone and o < tombstones_end))


def tombstones_end(
    cover_times: Iterable[tuple[int, int]], *, now_ms: int, delete_retention_ms: int, floor: int = 0
) -> int:
    """The offset below which tombstones are over.

    *Shape*: ``cover_times`` are (horizon, time) pairs: the compaction at that time covered the offsets below that
    horizon. ``floor`` is what an earlier compaction has found: what was over stays over.
    """
    over = [horizon for horizon, at_ms in cover_times if at_ms + delete_retention_ms <= now_ms]
    return max([floor, *over])

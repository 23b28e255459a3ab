"""How many bytes of a partition the commit log retains, for status: kept up from call to call.

As long as nothing has expired it is what the state row has counted. After that, sums of portions of index entries
are remembered: new entries are added, portions that have expired are dropped, the one that expires in its middle is
summed again. A call looks at a bounded number of entries, so the first ones after a start may show less than there
is; each goes on where the one before stopped.
"""

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

from firn_node.index import PartitionIndex

PORTION_ENTRIES = 1024
PORTIONS_A_CALL = 16
PARTITIONS_MAX = 10_000

Key = tuple[int, int]


class _Portion(NamedTuple):
    end: int  # offset
    bytes: int
    entries: int


@dataclass(slots=True)
class _Sums:
    start: int  # offsets [start, upto) are summed
    upto: int
    total: int = 0
    portions: deque[_Portion] = field(default_factory=deque)  # oldest first


class RawBytes:
    def __init__(self, index: PartitionIndex) -> None:
        self._index = index
        self._known: dict[Key, _Sums] = {}

    def of(self, key: Key, bounds: tuple[int, int] | None, counted: int) -> int:
        """The bytes of the offsets in ``bounds``; ``counted``: of all that was ever dispatched."""
        if bounds is None or bounds[0] >= bounds[1]:
            return 0
        if bounds[0] == 0:
            return counted
        sums = self._known.get(key)
        if sums is None or bounds[0] >= sums.upto:
            if len(self._known) >= PARTITIONS_MAX:
                self._known.clear()
            sums = self._known[key] = _Sums(bounds[0], bounds[0])
        self._expire(key, sums, bounds[0])
        for _ in range(PORTIONS_A_CALL):
            if sums.upto >= bounds[1]:
                break
            self._extend(key, sums, bounds[1])
        return sums.total

    def _expire(self, key: Key, sums: _Sums, first: int) -> None:
        if first <= sums.start:
            return
        sums.start = first
        while sums.portions and sums.portions[0].end <= first:
            sums.total -= sums.portions.popleft().bytes
        if not sums.portions:
            sums.upto = first
            return
        cut = sums.portions.popleft()
        entries = self._index.scan(*key, first, end=cut.end, limit=PORTION_ENTRIES)
        left = _Portion(cut.end, sum(entry.size for entry in entries), len(entries))
        sums.portions.appendleft(left)
        sums.total += left.bytes - cut.bytes

    def _extend(self, key: Key, sums: _Sums, end: int) -> None:
        entries = self._index.scan(*key, sums.upto, end=end, limit=PORTION_ENTRIES)
        if not entries:
            sums.upto = end
            return
        size, count, upto = sum(entry.size for entry in entries), len(entries), entries[-1].end_offset
        if sums.portions and sums.portions[-1].entries + count <= PORTION_ENTRIES:
            last = sums.portions.pop()
            sums.portions.append(_Portion(upto, last.bytes + size, last.entries + count))
        else:
            sums.portions.append(_Portion(upto, size, count))
        sums.upto, sums.total = upto, sums.total + size

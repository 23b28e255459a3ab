"""Keys that are asked for at once, and the records that were found, both in columns.

Invariant: values lie in one arena in the order in which they were found, which is that of the batches they come
from; ``values`` puts them into the order of the keys.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from firn.values import LATER, NONE
from firn_node.kernels.jit import aligned
from firn_node.kernels.taking import AGAIN, in_order

U8 = NDArray[np.uint8]
I64 = NDArray[np.int64]
U64 = NDArray[np.uint64]
U32 = NDArray[np.uint32]
ANSWER_BYTES_MAX = 8 << 20  # of the values of one answer, and one batch more; what is left is asked for again
_ARENA_BYTES = 64 << 10


class FoundRow(NamedTuple):
    """The newest served row of a key; ``value`` is None for a tombstone in its time."""

    offset: int
    timestamp: int
    value: bytes | None
    tag: str | None
    headers: dict[str, str]


class Wanted(NamedTuple):
    """Keys one after another, where each starts (and the last one ends), and their fingerprints."""

    keys: U8
    starts: I64
    hi: U64
    lo: U32

    def key(self, pick: int) -> bytes:
        return self.keys[int(self.starts[pick]) : int(self.starts[pick + 1])].tobytes()


def joined(keys: Sequence[bytes]) -> tuple[U8, I64]:
    """Keys one after another, and where each starts, the end of the last one included."""
    starts = np.zeros(len(keys) + 1, np.int64)
    np.cumsum(np.fromiter(map(len, keys), np.int64, len(keys)), out=starts[1:])
    return np.frombuffer(b"".join(keys), np.uint8), starts


class Answers:
    """What is known of each wanted key. A *pick* is the number of one.

    ``lengths``: of the value; NONE: no record or a tombstone; LATER: there is no room for more; AGAIN, in between:
    only a look-up of this key alone can tell.
    """

    def __init__(self, count: int, *, bytes_max: int = ANSWER_BYTES_MAX) -> None:
        self.offsets = np.full(count, -1, np.int64)
        self.timestamps = np.zeros(count, np.int64)
        self.lengths = np.full(count, NONE, np.int64)
        self.partitions = np.zeros(count, np.int32)
        self.extras: dict[
            int, tuple[str | None, dict[str, str]]
        ] = {}  # tags and headers, where there are any
        self.starts = np.zeros(count, np.int64)
        self.arena = np.empty(_ARENA_BYTES, np.uint8)
        self.used = 0
        self._bytes_max = bytes_max

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def is_full(self) -> bool:
        return self.used >= self._bytes_max

    def make_room(self, more: int) -> None:
        """Room for so many bytes of values."""
        if self.used + more > len(self.arena):
            larger = np.empty(max(2 * len(self.arena), self.used + more), np.uint8)
            larger[: self.used] = self.arena[: self.used]
            self.arena = larger

    def put(self, pick: int, row: FoundRow | None, *, is_known: bool) -> None:
        """The row that was found for one key. ``is_known``: without one, it has none; else that is doubtful."""
        if row is None or row.value is None:
            self.lengths[pick] = NONE if is_known or row is not None else AGAIN
            return
        if self.is_full:
            self.lengths[pick] = LATER
            return
        size = len(row.value)
        self.make_room(size)
        self.arena[self.used : self.used + size] = np.frombuffer(row.value, np.uint8)
        self.offsets[pick], self.timestamps[pick] = row.offset, row.timestamp
        self.lengths[pick], self.starts[pick] = size, self.used
        self.used += size
        if row.tag is not None or row.headers:
            self.extras[pick] = (row.tag, row.headers)

    def row(self, pick: int) -> FoundRow | None:
        """A record that was found. The key must have been answered."""
        size, start = int(self.lengths[pick]), int(self.starts[pick])
        if size < 0:
            return None
        value = self.arena[start : start + size].tobytes()
        tag, headers = self.extras.get(pick, (None, {}))
        return FoundRow(int(self.offsets[pick]), int(self.timestamps[pick]), value, tag, headers)

    def doubtful(self) -> list[int]:
        """The picks that have to be looked up alone."""
        found: list[int] = np.flatnonzero(self.lengths == AGAIN).tolist()
        return found

    def values(self) -> U8:
        """The values one after another, in the order of the keys."""
        out = np.empty(int(np.maximum(self.lengths, 0).sum()), np.uint8)
        in_order(aligned(self.arena, np.uint8), self.starts, self.lengths, out)
        return out

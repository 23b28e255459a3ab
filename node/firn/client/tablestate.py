"""A table's map of one topic: the newest value per key, and what changed. No I/O.

Per live key: its bytes, its value, and in packed arrays the offset and partition of its record. Memory follows the
live keys; a deleted key leaves nothing behind.

Invariants: what the map shows of a key never goes back to an older record. A partition is read in offset order, so
only a *pass* (reading a partition anew, after SnapshotExpired, perhaps from another replica) can bring older
records: it is held apart and applied as a whole once it has reached what was known before, and then only what
differs is reported. A key lives in one partition (the one its hash names): a record of it in another one is
taken as newer.
"""

from array import array
from collections.abc import Callable, Iterator

Change = Callable[[bytes, bytes | None, bytes | None], None]


_NOTHING: tuple[int, bytes | None] = (-2, None)  # below every offset, and below -1: see ``forget_offsets``


class _Pass:
    """A partition being read anew: what differs from the map, and which keys were met as they are."""

    __slots__ = ("found", "met")

    def __init__(self, slots: int) -> None:
        self.found: dict[bytes, tuple[int, bytes | None]] = {}
        self.met = bytearray(slots)


class TableState:
    """The map. Changes are reported to ``changed`` as (key, old, new); None is absence."""

    def __init__(self, changed: Change) -> None:
        self._changed = changed
        self._slots: dict[bytes, int] = {}
        self._values: list[bytes | None] = []
        self._offsets = array("q")
        self._partitions = array("i")
        self._free = array("q")
        self._passes: dict[int, _Pass] = {}

    def __len__(self) -> int:
        return len(self._slots)

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._slots)

    def __contains__(self, key: object) -> bool:
        return key in self._slots

    def get(self, key: bytes) -> bytes | None:
        slot = self._slots.get(key)
        return None if slot is None else self._values[slot]

    def offset(self, key: bytes) -> int | None:
        """The offset of the key's record, as ``if_offset`` wants it."""
        slot = self._slots.get(key)
        return None if slot is None else self._offsets[slot]

    def apply(self, partition: int, offset: int, key: bytes, value: bytes | None) -> None:
        """Take the next record of a partition."""
        current = self._passes.get(partition)
        if current is not None:
            self._apply_to_pass(current, partition, offset, key, value)
        elif value is None:
            self._remove(key, partition, offset)
        else:
            self._put(key, partition, offset, value)

    def _put(self, key: bytes, partition: int, offset: int, value: bytes) -> None:
        slot = self._slots.get(key)
        if slot is None:
            slot = self._new_slot()
            self._slots[key] = slot
            old = None
        else:
            if self._partitions[slot] == partition and self._offsets[slot] >= offset:
                return
            old = self._values[slot]
        self._values[slot] = value
        self._offsets[slot] = offset
        self._partitions[slot] = partition
        if old != value:
            self._changed(key, old, value)

    def _new_slot(self) -> int:
        if self._free:
            return self._free.pop()
        self._values.append(None)
        self._offsets.append(0)
        self._partitions.append(0)
        return len(self._values) - 1

    def _remove(self, key: bytes, partition: int, offset: int) -> None:
        slot = self._slots.get(key)
        if slot is None or (self._partitions[slot] == partition and self._offsets[slot] > offset):
            return
        del self._slots[key]
        old, self._values[slot] = self._values[slot], None
        self._free.append(slot)
        self._shrink()
        self._changed(key, old, None)

    def _shrink(self) -> None:
        """Give memory back when three quarters of many slots are free."""
        if len(self._free) < 1024 or len(self._free) * 4 < len(self._values) * 3 or self._passes:
            return
        order = list(self._slots.items())
        self._values = [self._values[slot] for _, slot in order]
        self._offsets = array("q", [self._offsets[slot] for _, slot in order])
        self._partitions = array("i", [self._partitions[slot] for _, slot in order])
        self._slots = {key: at for at, (key, _) in enumerate(order)}
        self._free = array("q")

    def begin_pass(self, partition: int) -> None:
        """The partition is read anew from its start; an unfinished pass of it is forgotten."""
        self._passes[partition] = _Pass(len(self._values))

    def is_in_pass(self, partition: int) -> bool:
        return partition in self._passes

    def forget_offsets(self, partition: int) -> None:
        """The topic was created anew: any record of its new life is newer than what is known."""
        for slot, found in enumerate(self._partitions):
            if found == partition:
                self._offsets[slot] = -1

    def _apply_to_pass(
        self, current: _Pass, partition: int, offset: int, key: bytes, value: bytes | None
    ) -> None:
        slot = self._slots.get(key)
        if slot is not None and self._partitions[slot] == partition and self._offsets[slot] == offset:
            if slot < len(current.met):
                current.met[slot] = 1
            current.found.pop(key, None)
        else:
            current.found[key] = (offset, value)

    def end_pass(self, partition: int) -> None:
        """The pass has reached everything that was known: the map becomes what it found."""
        current = self._passes.pop(partition, None)
        if current is None:
            return
        # A record that the pass did not meet, nor a newer one of its key, is gone: its key was deleted, and the
        # tombstone too is gone by now. An older record of the key that the pass met says nothing against that.
        gone = [
            (key, self._offsets[slot])
            for key, slot in self._slots.items()
            if self._partitions[slot] == partition
            and not (slot < len(current.met) and current.met[slot])
            and current.found.get(key, _NOTHING)[0] <= self._offsets[slot]
        ]
        for key, offset in gone:
            current.found.pop(key, None)
            self._remove(key, partition, offset)
        for key, (offset, value) in current.found.items():
            if value is None:
                self._remove(key, partition, offset)
            else:
                self._put(key, partition, offset, value)

"""Key-value maps by the real bytes of keys, and key indexes against the keys they index."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from firn.batch import Batch


class Newest(NamedTuple):
    """The newest record of a key; ``value`` is a hash of its bytes, None for a tombstone."""

    offset: int
    timestamp: int
    value: int | None


class KeyMap(dict[bytes, Newest]):
    """The newest record of every key."""

    def add_newer(self, batch: Batch, *, start: int = 0) -> None:
        """Take the records of a batch from offset ``start`` on; they are newer than all before."""
        for key, row in _rows(batch):
            if row.offset >= start:
                self[key] = row

    def add(self, batch: Batch, *, masked: NDArray[np.bool_]) -> int | None:
        """Take the unmasked records; the offset of one whose key is there already, which must not be."""
        duplicate = None
        for (key, row), is_masked in zip(_rows(batch), masked.tolist(), strict=True):
            if is_masked:
                continue
            if key in self and duplicate is None:
                duplicate = row.offset
            self[key] = row
        return duplicate


def _rows(batch: Batch) -> Iterator[tuple[bytes, Newest]]:
    c = batch.columns
    for key, value, offset, timestamp in zip(
        batch.key_list(), batch.value_list(), c.offsets.tolist(), c.timestamps.tolist(), strict=True
    ):
        yield key, Newest(offset, timestamp, None if value is None else hash(value))


def compare_maps(raw: KeyMap, view: KeyMap, *, limit: int) -> list[str]:
    """One sentence for each key on which the two differ, ``limit`` at most.

    A key whose newest record is a tombstone may be absent from the view: the tombstone's time may be over.
    """
    found: list[str] = []
    for key, wanted in raw.items():
        if len(found) == limit:
            return found
        got = view.get(key)
        if got == wanted or (wanted.value is None and got is None):
            continue
        if got is None:
            found.append(
                f"key {key!r}: its newest record, offset {wanted.offset}, is missing from the compacted view"
            )
        else:
            found.append(
                f"key {key!r}: the compacted view serves offset {got.offset}, the newest is offset {wanted.offset}"
            )
    for key, got in view.items():
        if len(found) == limit:
            return found
        if key not in raw:
            found.append(
                f"key {key!r}: the compacted view serves offset {got.offset}, the raw view has no such key"
            )
    return found


def check_key_rows(
    hi: NDArray[np.uint64], word: NDArray[np.uint64], keys: Sequence[bytes], tombstones: Sequence[bool], topic_id: int,
    secret: Any,
) -> str | None:  # fmt: skip
    """What is wrong with a key index, given the keys of its rows in order; None when it is right."""
    from firn_node.kernels import fingerprint

    if len(hi) != len(keys):
        return f"the key index has {len(hi)} rows for {len(keys)} records"
    if not keys:
        return None
    raw = np.frombuffer(b"".join(keys), np.uint8)
    lengths = np.fromiter(map(len, keys), np.int32, len(keys))
    wanted_hi, wanted_lo = fingerprint(raw, lengths, topic_id, secret)
    row = ((word & np.uint64(0xFFFFFFFF)) >> np.uint64(1)).astype(np.int64)
    if (np.sort(row) != np.arange(len(keys))).any():
        return "the key index does not hold every row once"
    flags = np.fromiter(tombstones, np.bool_, len(tombstones))
    is_right = (
        (wanted_hi[row] == hi)
        & (wanted_lo[row].astype(np.uint64) == word >> np.uint64(32))
        & (flags[row] == ((word & np.uint64(1)) == 1))
    )
    if not is_right.all():
        at = int(row[int(np.argmin(is_right))])
        return f"the key index does not fit the key of row {at}, {keys[at]!r:.80}"
    return None

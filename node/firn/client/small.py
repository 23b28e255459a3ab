"""Few plain records to the bytes of a batch, in plain Python: arrays cost more than they save there.

What ``chunks.cut`` and ``batch.encode`` do to a chunk of a million records takes them 100 us for one record; this
takes 15. Below ``RECORDS_MAX`` records without tags, headers, queues, chosen partitions or a codec come this way;
their batches are the same bytes as by the other one (a test holds them to it).
"""

import struct
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from firn import limits
from firn.batch import HEADER, HEADER_BYTES, LENGTHS_BYTES, MAGIC, VERSION, header_crc
from firn.crc import crc32c
from firn.partitioner import partition_of, partitions_of

RECORDS_MAX = 64
_BY_ARRAYS_FROM = 16  # keys to place: from here on array arithmetic is faster


class Writer(NamedTuple):
    """Where a batch belongs and who wrote it: an ``Identity`` of a client, which costs a tenth to make."""

    topic_id: int
    partition: int
    producer_id: int
    producer_epoch: int
    sequence: int


# Partition, rows, keys, values.
Part = tuple[int, list[int] | NDArray[np.int64], list[bytes], list[bytes | None]]


def small_bytes(flat: Sequence[object], fields: int) -> int | None:
    """The bytes of keys and values when the records in ``flat``, ``fields`` items each, may come this way, else None.

    They may when keys are ``bytes`` within the limit, values are or are None, and all else is None.
    """
    total = 0
    for at in range(0, len(flat), fields):
        key, value = flat[at], flat[at + 1]
        if type(key) is not bytes or len(key) > limits.KEY_BYTES_MAX:
            return None
        total += len(key)
        if value is not None:
            if type(value) is not bytes or len(value) > limits.VALUE_BYTES_MAX:
                return None
            total += len(value)
        for other in flat[at + 2 : at + fields]:
            if other is not None:
                return None
    return total


def parted(keys: list[bytes], values: list[bytes | None], partitions: int) -> list[Part]:
    """The records of each partition, in the order sent."""
    if partitions == 1:
        return [(0, list(range(len(keys))), keys, values)]
    if len(keys) < _BY_ARRAYS_FROM:
        placed = [partition_of(key, partitions) for key in keys]
    else:
        placed = partitions_of(keys, partitions).tolist()
    found: dict[int, tuple[int, list[int], list[bytes], list[bytes | None]]] = {}
    for row, partition in enumerate(placed):
        part = found.setdefault(partition, (partition, [], [], []))
        part[1].append(row)
        part[2].append(keys[row])
        part[3].append(values[row])
    return [found[partition] for partition in sorted(found)]


def encode_small(
    keys: Sequence[bytes], values: Sequence[bytes | None], timestamp: int, writer: Writer
) -> bytes:
    """One whole batch of records that ``small_bytes`` has cleared."""
    n = len(keys)
    all_keys = b"".join(keys)
    all_values = b"".join([value for value in values if value is not None])
    first = b"".join((
        _columns(n).pack(
            len(all_keys), len(all_keys), 0, 0, len(all_values), len(all_values), 0, 0,
            *map(len, keys),
            *[-1 if value is None else len(value) for value in values],
            *[timestamp] * n,
        ),
        all_keys,
        bytes(-len(all_keys) % 8),
    ))  # fmt: skip
    second = all_values + bytes(-len(all_values) % 8)
    head = HEADER.pack(
        MAGIC, VERSION, 0, 0, HEADER_BYTES + len(first) + len(second), len(first), n, crc32c(first), crc32c(second),
        writer.topic_id, writer.partition, 0, 0, n - 1, writer.producer_id, writer.producer_epoch, writer.sequence,
        timestamp, timestamp, 0,
    )  # fmt: skip
    return b"".join((head[:8], header_crc(head).to_bytes(4, "little"), head[12:], first, second))


@lru_cache(maxsize=RECORDS_MAX)
def _columns(records: int) -> struct.Struct:
    """Lengths of the columns, then lengths of keys and of values, padded to 8 bytes each, then timestamps."""
    padding = "4x" if records % 2 else ""
    found = struct.Struct(f"<8I{records}i{padding}{records}i{padding}{records}q")
    assert found.size == LENGTHS_BYTES + 2 * (4 * records + 4 * (records % 2)) + 8 * records
    return found

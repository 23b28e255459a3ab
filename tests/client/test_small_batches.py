"""Few records take a way of their own: what comes out is what the way of many gives."""

import asyncio
import random

import numpy as np
import pytest

from firn import limits
from firn.batch import Columns, Identity, columns_of, encode
from firn.client.chunks import FIELDS, Chunk, Cut, cut, cut_small, fields_of
from firn.client.small import RECORDS_MAX, Writer, encode_small, small_bytes

SIZES = (0, 1, 7, 8, 9, 100)


def some(seed: int, count: int) -> tuple[list[bytes], list[bytes | None]]:
    chance = random.Random(seed)
    keys = [chance.randbytes(chance.choice(SIZES)) for _ in range(count)]
    return keys, [None if chance.random() < 0.2 else chance.randbytes(chance.choice(SIZES)) for _ in keys]


def encoded(part: Cut) -> bytes:
    assert isinstance(part.columns, Columns), "the records of these tests are not even"
    return encode(part.columns, Identity(topic_id=9, partition=part.partition))


@pytest.mark.parametrize("count", [1, 2, 3, 15, 16, 17, RECORDS_MAX])
def test_a_small_batch_has_the_bytes_that_encode_gives(count: int) -> None:
    keys, values = some(count, count)
    writer = Writer(topic_id=9, partition=3, producer_id=(1 << 64) - 1, producer_epoch=2, sequence=77)
    found = encode_small(keys, values, 1_700_000_000_123, writer)
    assert found == encode(columns_of(keys, values, 1_700_000_000_123), Identity(**writer._asdict()))


@pytest.mark.parametrize("partitions", [1, 2, 7])
@pytest.mark.parametrize("count", [1, 5, 40])
def test_a_small_chunk_is_parted_as_a_large_one(count: int, partitions: int) -> None:
    async def main() -> None:
        keys, values = some(count, count)
        flat = [x for row in zip(keys, values, strict=True) for x in (*row, None, None, None, None, None)]
        loop = asyncio.get_running_loop()
        small, large = Chunk(loop, 0), Chunk(loop, 0)
        size = small_bytes(flat, FIELDS)
        assert size is not None
        small.fill_small(fields_of(flat), size)
        large.fill(fields_of(flat))
        assert small.bytes == large.bytes
        few = [
            (partition, rows, encode_small(keys, values, 5, Writer(9, partition, 0, 0, 0)))
            for partition, rows, keys, values in cut_small(small, partitions)
        ]
        many = [
            (c.partition, c.rows.tolist(), encoded(c))
            for c in cut(large, partitions, batch_bytes=1 << 20, now_ms=5)
            if isinstance(c, Cut)
        ]
        assert few == many
        assert np.asarray(small.partitions).tolist() == np.asarray(large.partitions).tolist()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("partitions", "batch_bytes", "has_few"),
    [(1, 1 << 20, False), (7, 50, False), (7, 1 << 20, True), (1000, 50, True), (1000, 1 << 20, True)],
)
def test_a_large_chunk_keeps_the_batches_of_few_records_small(
    partitions: int, batch_bytes: int, has_few: bool
) -> None:
    def batches(*, keeps_small: bool) -> list[tuple[int, list[int], bytes]]:
        chunk = Chunk(asyncio.get_running_loop(), 0)
        chunk.fill([keys, values, None, None, None, None, None])
        found = cut(chunk, partitions, batch_bytes=batch_bytes, now_ms=5, is_plain=keeps_small)
        kinds.append({type(c) for c in found})
        return [
            (c.partition, c.rows.tolist(), encoded(c))
            if isinstance(c, Cut)
            else (c[0], list(c[1]), encode_small(c[2], c[3], 5, Writer(9, c[0], 0, 0, 0)))
            for c in found
        ]

    async def main() -> None:
        assert batches(keeps_small=False) == batches(keeps_small=True)

    keys, values = some(3, 300)
    kinds: list[set[type]] = []
    asyncio.run(main())
    assert kinds[0] == {Cut}
    assert (tuple in kinds[1]) == has_few


@pytest.mark.parametrize(
    "row",
    [
        ("text", b"", None, None, None, None, None),
        (bytearray(b"k"), b"", None, None, None, None, None),
        (None, b"", None, None, None, None, None),
        (bytes(limits.KEY_BYTES_MAX + 1), b"", None, None, None, None, None),
        (b"k", "text", None, None, None, None, None),
        (b"k", bytes(limits.VALUE_BYTES_MAX + 1), None, None, None, None, None),
        (b"k", b"", "tag", None, None, None, None),
        (b"k", b"", None, 5, None, None, None),
        (b"k", b"", None, None, {}, None, None),
        (b"k", b"", None, None, None, (), None),
        (b"k", b"", None, None, None, None, 0),
    ],
)
def test_a_record_that_is_not_plain_goes_the_other_way(row: tuple[object, ...]) -> None:
    plain = (b"k", b"v", None, None, None, None, None)
    assert small_bytes([*plain, *plain], FIELDS) == 4
    assert small_bytes([*plain, *row], FIELDS) is None

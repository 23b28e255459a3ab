"""Records whose keys, and whose values, are of one length: known in one pass, and the same batches as by the other way."""

import asyncio
import random
from typing import Any

import numpy as np
import pytest

from firn import limits
from firn.batch import Batch, Identity, encode
from firn.client.chunks import Chunk, Cut, cut
from firn.client.even import EVEN_RECORDS_MIN, Even, encode_even, even_parts, even_rows
from firn.client.small import Writer, encode_small
from firn.partitioner import partition_of

WRITER = Writer(topic_id=9, partition=3, producer_id=(1 << 64) - 1, producer_epoch=2, sequence=77)


def some(count: int, key_bytes: int, value_bytes: int) -> tuple[list[bytes], list[bytes]]:
    chance = random.Random(f"{count} {key_bytes} {value_bytes}")
    return [chance.randbytes(key_bytes) for _ in range(count)], [
        chance.randbytes(value_bytes) for _ in range(count)
    ]


@pytest.mark.parametrize("count", [EVEN_RECORDS_MIN, 33, 1000, limits.BATCH_RECORDS_MAX])
@pytest.mark.parametrize(("key_bytes", "value_bytes"), [(1, 7), (16, 8), (255, 1), (1, 256), (256, 3)])
def test_an_even_batch_has_the_bytes_that_encode_gives(count: int, key_bytes: int, value_bytes: int) -> None:
    keys, values = some(count, key_bytes, value_bytes)
    even = even_rows(keys, values)
    assert even is not None
    even = even.stamped(1_700_000_000_123)
    found = encode_even(even, WRITER)
    assert found == encode(even.columns(), Identity(**WRITER._asdict()))
    assert (Batch(found).key_list(), Batch(found).value_list()) == (keys, values)


def test_large_values_are_even_too() -> None:
    keys, values = some(EVEN_RECORDS_MIN, 2, 1 << 16)
    even = even_rows(keys, values)
    assert even is not None
    assert Batch(encode_even(even, WRITER)).value_list() == values


@pytest.mark.parametrize("at", [0, 1, 39, -1])
@pytest.mark.parametrize(
    "other",
    [
        b"shorter", b"longer than the rest", b"", None, "sixteen letters.", 5, ("sixteen", "letters."), [b"nested"],
        {b"k": b"v"}, object(), np.zeros(16, np.uint8), memoryview(b"two times sixteen bytes, as it is")[::2],
    ],
)  # fmt: skip
def test_one_that_differs_makes_the_rest_uneven(at: int, other: Any) -> None:
    keys, values = some(40, 16, 16)
    mixed: list[Any] = list(keys)
    mixed[at] = other
    assert even_rows(keys, values) is not None
    assert even_rows(mixed, values) is None
    assert even_rows(keys, mixed) is None
    assert even_parts(mixed, values, part_bytes=1 << 20) is None


def test_lengths_that_make_up_for_one_another_are_found() -> None:
    keys, values = some(40, 16, 16)
    keys[7], keys[8] = keys[7] + b"x", keys[8][:-1]
    assert even_rows(keys, values) is None
    keys, _ = some(40, 16, 16)
    keys[7] = b"\xc4\x10" + keys[7]  # a row's head as data
    keys[8] = keys[8][:-2]
    assert even_rows(keys, values) is None


@pytest.mark.parametrize("kind", [bytearray, memoryview])
def test_other_buffers_of_the_same_length_are_read_at_once(kind: Any) -> None:
    keys, values = some(40, 16, 16)
    raw = bytearray(keys[5])
    mixed: list[Any] = [*keys[:5], kind(raw), *keys[6:]]
    even = even_rows(mixed, values)
    assert even is not None
    raw[:] = bytes(16)
    assert even.keys.tolist() == keys


def test_records_beyond_a_limit_are_left_to_the_closer_look() -> None:
    many = EVEN_RECORDS_MIN
    assert even_rows([bytes(limits.KEY_BYTES_MAX)] * many, [b"v"] * many) is not None
    assert even_rows([bytes(limits.KEY_BYTES_MAX + 1)] * many, [b"v"] * many) is None
    assert even_rows([b"k"] * many, [bytes(limits.VALUE_BYTES_MAX + 1)] * many) is None


@pytest.mark.parametrize("partitions", [1, 7, 1000, 70_000])
@pytest.mark.parametrize("batch_bytes", [50, 1000, 1 << 20])
def test_even_records_are_parted_as_others(partitions: int, batch_bytes: int) -> None:
    keys, values = some(500, 9, 11)

    def batches(
        keys: list[bytes], values: list[bytes], *, is_plain: bool
    ) -> list[tuple[int, list[int], bytes]]:
        chunk = Chunk(asyncio.get_running_loop(), 0)
        chunk.fill([keys, values, None, None, None, None, None])
        kinds.append(chunk.even is not None)
        found = cut(chunk, partitions, batch_bytes=batch_bytes, now_ms=5, is_plain=is_plain)
        assert not chunk.fields
        assert chunk.even is None
        assert np.asarray(chunk.partitions).tolist() == [partition_of(key, partitions) for key in keys]
        made = []
        for part in found:
            if not isinstance(part, Cut):
                partition, rows, few, of_few = part
                data = encode_small(few, of_few, 5, Writer(9, partition, 1, 0, 0))
                made.append((partition, list(rows), data))
                continue
            writer = Writer(9, part.partition, 1, 0, 0)
            if isinstance(part.columns, Even):
                data = bytes(encode_even(part.columns, writer))
            else:
                data = encode(part.columns, Identity(**writer._asdict()))
            made.append((part.partition, part.rows.tolist(), data))
        return made

    async def main() -> None:
        even = batches(keys, values, is_plain=True)
        assert even == batches(keys, values, is_plain=False)
        # One record more, of other lengths, sends all of them the other way; it is its own batch, or the last row of one.
        others = batches([*keys, b"a longer key"], [*values, b""], is_plain=False)
        without = [(partition, [row for row in rows if row < 500]) for partition, rows, _ in others]
        if batch_bytes == 50:
            assert [rows for _, rows, _ in even] == [rows for _, rows in without if rows]
        assert sorted(row for _, rows, _ in even for row in rows) == list(range(500))

    kinds: list[bool] = []
    asyncio.run(main())
    assert kinds == [True, True, False]


@pytest.mark.parametrize("at_once_max", [1 << 20, 0])
def test_parts_are_of_about_the_size_asked_for(at_once_max: int) -> None:
    keys, values = some(905, 16, 100)
    parts = even_parts(keys, values, part_bytes=132 * 300, at_once_max=at_once_max)
    assert parts is not None
    found = list(parts)
    assert [part.records for part in found] == [300, 300, 300, 5]
    assert [key for part in found for key in part.keys.tolist()] == keys
    assert [value for part in found for value in part.values.tolist()] == values


@pytest.mark.parametrize("at_once_max", [1 << 20, 0])
@pytest.mark.parametrize("odd", [None, "text", bytearray(16), b"a key of another length", b""])
def test_what_is_not_even_is_known_before_there_is_a_part(odd: Any, at_once_max: int) -> None:
    keys, values = some(1000, 16, 16)
    mixed = [*keys[:-1], odd]
    assert even_parts(keys, values, part_bytes=48 * 300, at_once_max=at_once_max) is not None
    assert even_parts(mixed, values, part_bytes=48 * 300, at_once_max=at_once_max) is None
    assert even_parts(keys, mixed, part_bytes=48 * 300, at_once_max=at_once_max) is None


@pytest.mark.parametrize("at_once_max", [1 << 20, 0])
def test_what_happens_to_the_lists_afterwards_does_not_show(at_once_max: int) -> None:
    keys, values = some(1000, 16, 100)
    given = list(keys), list(values)
    parts = even_parts(*given, part_bytes=132 * 300, at_once_max=at_once_max)
    assert parts is not None
    found = []
    for part in parts:
        found += zip(part.keys.tolist(), part.values.tolist(), strict=True)
        given[0].clear()
        given[1][:] = [b""] * 10
    assert found == list(zip(keys, values, strict=True))


@pytest.mark.parametrize("at_once_max", [1 << 20, 0])
def test_records_larger_than_the_limits_are_not_even(at_once_max: int) -> None:
    _, values = some(EVEN_RECORDS_MIN, 16, 16)
    large = [bytes(limits.KEY_BYTES_MAX + 1)] * EVEN_RECORDS_MIN
    assert even_parts(large, values, part_bytes=1 << 30, at_once_max=at_once_max) is None


@pytest.mark.parametrize("at_once_max", [1 << 20, 0])
def test_parts_that_differ_from_one_another_are_not_even(at_once_max: int) -> None:
    first, second = some(300, 16, 100), some(300, 17, 100)
    keys, values = first[0] + second[0], first[1] + second[1]
    assert even_parts(keys, values, part_bytes=132 * 300, at_once_max=at_once_max) is None

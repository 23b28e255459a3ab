"""Which records of a chunk need no further look, and how long they are."""

from typing import Any

import pytest

from firn import limits
from firn.client.chunks import plain_lengths


def lengths_of(keys: list[Any], values: list[Any]) -> Any:
    found = plain_lengths([keys, values, None, None, None, None, None])
    return found and (found[0].tolist(), found[1].tolist())


@pytest.mark.parametrize(
    ("keys", "values", "key_lengths", "value_lengths"),
    [
        ([b"ab", b"cd"], [b"xyz", b"xyz"], [2, 2], [3, 3]),
        ([b"ab", b"cd", b"e"], [b"xyz", b"xyz", b""], [2, 2, 1], [3, 3, 0]),
        ([b"", b"cd"], [b"", b"x"], [0, 2], [0, 1]),
        ([b"ab", b"cd"], [b"xyz", None], [2, 2], [3, -1]),
        ([b"ab", b"cd"], [None, None], [2, 2], [-1, -1]),
    ],
)
def test_each_plain_record_has_its_own_lengths(
    keys: list[Any], values: list[Any], key_lengths: list[int], value_lengths: list[int]
) -> None:
    assert lengths_of(keys, values) == (key_lengths, value_lengths)


@pytest.mark.parametrize("other", [bytearray(b"cd"), memoryview(b"cd"), "cd", 5, (1, 2)])
def test_one_that_is_not_bytes_sends_all_to_the_closer_look(other: Any) -> None:
    assert lengths_of([b"ab", other], [b"xy", b"zz"]) is None
    assert lengths_of([b"ab", b"cd"], [b"xy", other]) is None
    assert lengths_of([b"ab", b"cd", b"ef"], [b"xy", None, other]) is None


def test_a_key_that_is_none_sends_all_to_the_closer_look() -> None:
    assert lengths_of([b"ab", None], [b"xy", b"zz"]) is None


def test_records_beyond_a_limit_go_to_the_closer_look() -> None:
    assert lengths_of([bytes(limits.KEY_BYTES_MAX)], [bytes(limits.VALUE_BYTES_MAX)]) is not None
    assert lengths_of([bytes(limits.KEY_BYTES_MAX + 1)], [b""]) is None
    assert lengths_of([b""], [bytes(limits.VALUE_BYTES_MAX + 1)]) is None

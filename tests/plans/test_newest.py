"""Which rows are dead, found by whole arrays, is what a dictionary of the real keys says."""

import random

import numpy as np
import pytest

from firn.errors import Unavailable
from firn_spark import newest
from firn_spark.newest import Newest, in_passes


def found(
    keys: list[bytes], *, slice: int = 0, slices: int = 1, portion: int = 37
) -> tuple[list[int], list[int]]:
    """The offsets seen and dead of keys whose offsets are 0, 3, 6..."""
    rows = Newest(slice=slice, slices=slices)
    for at in range(0, len(keys), portion):
        if at % 3 == 1:
            rows.reduce()
        part = keys[at : at + portion]
        offsets = 3 * np.arange(at, at + len(part))
        lengths = np.array([len(key) for key in part], np.int32)
        rows.add(offsets, lengths, np.frombuffer(b"".join(part), np.uint8))
    seen, dead = rows.found()
    return seen.tolist(), dead.tolist()


def expected(keys: list[bytes]) -> list[int]:
    last = {key: at for at, key in enumerate(keys)}
    return [3 * at for at, key in enumerate(keys) if last[key] != at]


@pytest.mark.parametrize("seed", range(20))
def test_keys_of_any_lengths_are_judged_by_their_bytes(seed: int) -> None:
    seeded = random.Random(seed)
    lengths = seeded.choice([[16], [0, 1, 7, 8, 9], [0], [3, 64, 65_536], list(range(40))])
    pool = [seeded.randbytes(seeded.choice(lengths)) for _ in range(seeded.randrange(1, 60))]
    keys = [seeded.choice(pool) for _ in range(seeded.randrange(200))]
    slices = seeded.choice([1, 2, 5])
    parts = [found(keys, slice=n, slices=slices) for n in range(slices)]
    assert sorted(o for seen, _ in parts for o in seen) == [3 * at for at in range(len(keys))]
    assert sorted(o for _, dead in parts for o in dead) == expected(keys)
    assert all(seen == sorted(seen) and dead == sorted(dead) for seen, dead in parts)


def test_keys_that_share_a_hash_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    true_hashes = newest.hashes
    monkeypatch.setattr(
        newest, "hashes", lambda words, length: true_hashes(words, length) & np.uint64(3 << 60)
    )
    seeded = random.Random(1)
    keys = [b"%08d" % seeded.randrange(30) for _ in range(500)]
    assert found(keys)[1] == expected(keys)


def test_zeros_at_the_end_make_another_key() -> None:
    assert found([b"a", b"a\0", b"a", b"", b"\0", b""])[1] == [0, 9]


def test_keys_that_take_more_memory_than_they_may_are_read_in_parts_and_a_hopeless_read_ends() -> None:
    keys = np.arange(3000, dtype=np.int64) % 1000
    asked: list[tuple[int, int]] = []

    def part(slice: int, slices: int, keys_bytes_max: int) -> tuple[newest.I64, newest.I64]:
        asked.append((slice, slices))
        rows = Newest(slice=slice, slices=slices, keys_bytes_max=keys_bytes_max)
        for at in range(0, len(keys), 100):
            chosen = keys[at : at + 100]
            rows.add(np.arange(at, at + 100), np.full(100, 8, np.int32), chosen.view(np.uint8))
        return rows.found()

    seen, dead = in_passes(lambda slice, slices: part(slice, slices, 6000), "all of it")
    assert (seen.tolist(), dead.tolist()) == (list(range(3000)), list(range(2000)))
    assert asked[-1][1] > 1
    with pytest.raises(Unavailable, match="all of it"):
        in_passes(lambda slice, slices: part(slice, slices, 8), "all of it")

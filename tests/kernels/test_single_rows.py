"""One row by a key index and out of its batch, in one call each: what is not certain is left to who reads step by step."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from firn_node.compaction.keyindex import FileKeyIndex, candidates
from firn_node.compaction.segment import KIND_KEYS, Layout, SegmentWriter, open_key_index
from firn_node.disk import RealDisk, RealFile
from firn_node.filecache import FileCache
from firn_node.kernels.single import (
    FOUND,
    NO_ROW,
    OTHER_KEY,
    STAMP_AND_DELTA,
    UNDECIDED,
    UNREADABLE,
    VALUE_AT,
    even_row,
    row_near,
)

SEED = 77


@pytest.fixture
def disk(tmp_path: Path) -> RealDisk:
    return RealDisk(str(tmp_path))


@pytest.fixture
def file(disk: RealDisk, tmp_path: Path) -> Iterator[RealFile]:
    made = disk.open(str(tmp_path / "file"), "create")
    yield made
    made.close()


def test_rows_of_a_key_index_file_are_those_that_whole_blocks_tell(disk: RealDisk, tmp_path: Path) -> None:
    random = np.random.default_rng(SEED)
    pool = random.integers(0, 1 << 64, 9000, np.uint64)
    # Some fingerprints have two rows or many, some share their upper bits alone.
    hi = np.sort(np.concatenate([pool, pool[:800], np.full(300, pool[7])]))
    low = random.integers(0, 2, len(hi), np.uint64)
    word = low << np.uint64(32) | random.permutation(len(hi)).astype(np.uint64) << np.uint64(1)
    order = np.lexsort((word, hi))
    path = str(tmp_path / "keys")
    writer = SegmentWriter(disk, path, topic_id=1, partition=0, kind=KIND_KEYS)
    writer.add_keys(hi[order], word[order])
    writer.finish(start=0, end=len(hi))
    cache = FileCache(disk, 8)
    index: FileKeyIndex = open_key_index(cache, path, Layout(rows=len(hi), batches=0, bytes=0))
    for number in range(len(index.fences)):
        index.block(number)
    wanted = np.concatenate(
        [pool, random.integers(0, 1 << 64, 200, np.uint64), index.fences, hi[:1], hi[-1:]]
    )
    for fingerprint in wanted.tolist():
        for lo in (0, 1):
            assert index.find(fingerprint, lo) == candidates(index, fingerprint, lo), f"seed {SEED}"
    cache.close()


def _near(
    file: RealFile, his: NDArray[np.uint64], words: NDArray[np.uint64], first: int, count: int, hi: int
) -> int:
    file.pwrite([his.tobytes(), words.tobytes()], 16)
    found: int = row_near(file.fileno(), 16, len(his), first, count, hi, 5)
    return found


def test_a_fingerprint_at_the_edge_of_the_window_or_with_several_rows_is_undecided(file: RealFile) -> None:
    his = np.array([10, 20, 30, 30, 40, 50], np.uint64)
    words = np.array([5 << 32 | row << 1 for row in (7, 8, 9, 10, 11, 12)], np.uint64)
    assert _near(file, his, words, 0, 6, 20) == 8
    assert _near(file, his, words, 0, 6, 50) == 12
    assert _near(file, his, words, 0, 6, 25) == _near(file, his, words, 0, 6, 60) == NO_ROW
    assert _near(file, his, words, 0, 6, 30) == UNDECIDED  # two rows
    assert _near(file, his, words, 1, 3, 20) == UNDECIDED  # an older row may lie before the window
    assert _near(file, his, words, 0, 3, 30) == UNDECIDED  # and a newer one behind it
    assert _near(file, his, words, 0, 3, 20) == 8
    words[1] = 6 << 32 | 8 << 1
    assert _near(file, his, words, 0, 6, 20) == NO_ROW  # the lower bits are another key's


def test_a_row_of_a_file_that_is_cut_short_is_undecided(file: RealFile) -> None:
    his = np.arange(10, dtype=np.uint64)
    words = np.full(10, 5 << 32, np.uint64)
    assert _near(file, his, words, 0, 10, 9) == 0
    file.truncate(16 + 8 * 19)
    assert row_near(file.fileno(), 16, 10, 0, 10, 9, 5) == UNDECIDED
    file.truncate(16 + 8 * 9)
    assert row_near(file.fileno(), 16, 10, 0, 10, 9, 5) == UNDECIDED


KEYS_AT, VALUES_AT, STAMPS_AT, DELTAS_AT, START, RECORDS, SIZE = 60, 100, 8, 40, 24, 4, 160


def _even(
    file: RealFile, row: int, key: bytes, *, value_size: int = 6, deltas_at: int = -1
) -> tuple[int, bytes]:
    batch = bytearray(SIZE)
    for n in range(RECORDS):
        batch[STAMPS_AT + 8 * n : STAMPS_AT + 8 * n + 8] = (1000 + n).to_bytes(8, "little")
        batch[DELTAS_AT + 4 * n : DELTAS_AT + 4 * n + 4] = (10 * n).to_bytes(4, "little")
        batch[KEYS_AT + 10 * n : KEYS_AT + 10 * n + 10] = b"key-%06d" % n
        batch[VALUES_AT + 6 * n : VALUES_AT + 6 * n + 6] = b"val-%02d" % n
    file.pwrite([bytes(START), batch], 0)
    out = np.zeros(VALUE_AT + max(value_size, 0), np.uint8)
    found = even_row(
        file.fileno(), START, row, KEYS_AT, VALUES_AT, value_size, STAMPS_AT, deltas_at, SIZE,
        np.frombuffer(key, np.uint8), out,
    )  # fmt: skip
    return found, out.tobytes()


def test_a_row_of_an_even_batch_is_its_timestamp_offset_and_value(file: RealFile) -> None:
    found, raw = _even(file, 3, b"key-000003")
    assert (found, STAMP_AND_DELTA.unpack_from(raw), raw[VALUE_AT:]) == (FOUND, (1003, 0), b"val-03")
    found, raw = _even(file, 2, b"key-000002", deltas_at=DELTAS_AT)
    assert (found, STAMP_AND_DELTA.unpack_from(raw), raw[VALUE_AT:]) == (FOUND, (1002, 20), b"val-02")
    found, raw = _even(file, 1, b"key-000001", value_size=-1)
    assert (found, STAMP_AND_DELTA.unpack_from(raw), raw[VALUE_AT:]) == (FOUND, (1001, 0), b"")
    assert _even(file, 2, b"key-000003")[0] == OTHER_KEY


def test_a_row_beyond_its_column_its_batch_or_its_file_is_unreadable(file: RealFile) -> None:
    assert _even(file, 4, b"key-000004")[0] == UNREADABLE  # its key would lie among the values
    assert _even(file, 3, b"key-000003", value_size=16)[0] == UNREADABLE  # 100 + 4 * 16 is past the batch
    assert _even(file, 3, b"key-000003")[0] == FOUND
    file.truncate(START + VALUES_AT + 20)
    out = np.zeros(VALUE_AT + 6, np.uint8)
    key = np.frombuffer(b"key-000003", np.uint8)
    rest = (KEYS_AT, VALUES_AT, 6, STAMPS_AT, -1, SIZE, key, out)
    assert even_row(file.fileno(), START, 3, *rest) == UNREADABLE
    file.truncate(START + KEYS_AT + 32)
    assert even_row(file.fileno(), START, 3, *rest) == UNREADABLE

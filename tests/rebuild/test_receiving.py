"""A segment as it arrives: whatever is damaged on its way is noticed, and its key index is the one of this folder."""

from pathlib import Path

import numpy as np
import pytest

from firn.batch import Codec, Codecs, Identity, columns_of, encode
from firn.errors import Corrupt
from firn_node.compaction.manifest import CleanSegment, Manifest
from firn_node.compaction.segment import Layout, open_key_index
from firn_node.disk import RealDisk
from firn_node.filecache import FileCache
from firn_node.kernels.hashing import fingerprint
from firn_node.rebuild.keyruns import KeyRuns
from firn_node.rebuild.receiving import Receiver

SECRET = np.array([3, 5], np.uint64)
TOPIC, PARTITION = 4096, 2


def batch(first: int, records: int, codecs: Codecs | None = None) -> bytes:
    keys = [b"key-%d" % at for at in range(first, first + records)]
    values = [None if at % 7 == 0 else b"value" * 20 for at in range(first, first + records)]
    identity = Identity(topic_id=TOPIC, partition=PARTITION)
    return encode(columns_of(keys, values, 1000 + first, base_offset=first), identity, codecs)


def segment_of(batches: list[bytes], rows: int) -> CleanSegment:
    return CleanSegment(
        name="000000000001.segment", start=0, end=rows, rows=rows, tombstones=-(-rows // 7),
        bytes=sum(map(len, batches)), batches=len(batches),
    )  # fmt: skip


def receiver_of(folder: Path, segment: CleanSegment) -> Receiver:
    manifest = Manifest(topic_id=TOPIC, partition=PARTITION, horizon=segment.end, segments=(segment,))
    return Receiver(RealDisk(folder), str(folder), manifest, segment, SECRET)


@pytest.mark.parametrize("codecs", [None, Codecs(keys=Codec.LZ4, values=Codec.ZSTD)])
def test_a_segment_that_arrives_in_any_pieces_is_whole_and_finds_its_keys(
    tmp_path: Path, codecs: Codecs | None
) -> None:
    batches = [batch(first, 100, codecs) for first in range(0, 1000, 100)]
    segment, data = segment_of(batches, 1000), b"".join(batches)
    receiver = receiver_of(tmp_path, segment)
    while receiver.left:
        end = min(receiver.at + 7000 + receiver.at % 997, len(data))
        while not receiver.take(memoryview(data[receiver.at : end])):
            end = min(end + 5000, len(data))
    receiver.finish()
    receiver.close()
    path = tmp_path / segment.name
    assert path.read_bytes().startswith(data)
    cache = FileCache(RealDisk(tmp_path), 4)
    layout = Layout(rows=segment.rows, batches=segment.batches, bytes=segment.bytes)
    index = open_key_index(cache, str(path), layout)
    for row in (0, 6, 499, 999):
        key = np.frombuffer(b"key-%d" % row, np.uint8)
        hi, lo = fingerprint(key, np.array([len(key)], np.int32), TOPIC, SECRET)
        assert index.find(int(hi[0]), int(lo[0])) == [row]
    cache.close()


@pytest.mark.parametrize("at", [4, 20, 60, 110, -9])
def test_a_flipped_bit_is_noticed_and_nothing_of_it_is_taken(tmp_path: Path, at: int) -> None:
    data = bytearray(batch(0, 100) + batch(100, 100))
    receiver = receiver_of(tmp_path, segment_of([batch(0, 100), batch(100, 100)], 200))
    data[at] ^= 1
    with pytest.raises(Corrupt):
        receiver.take(memoryview(data))
    assert receiver.at == 0
    receiver.close()


def test_batches_of_another_partition_or_out_of_order_are_refused(tmp_path: Path) -> None:
    receiver = receiver_of(tmp_path, segment_of([batch(0, 100), batch(100, 100)], 200))
    with pytest.raises(Corrupt, match="behind offset"):
        receiver.take(memoryview(batch(100, 100) + batch(0, 100)))
    identity = Identity(topic_id=TOPIC, partition=PARTITION + 1)
    with pytest.raises(Corrupt, match="partition 3"):
        receiver.take(memoryview(encode(columns_of([b"k"], [b"v"], 1), identity)))
    receiver.close()


def test_a_segment_with_other_rows_than_its_manifest_says_is_refused(tmp_path: Path) -> None:
    batches = [batch(0, 100), batch(100, 99)]
    receiver = receiver_of(tmp_path, segment_of(batches, 200))
    receiver.take(memoryview(b"".join(batches)))
    with pytest.raises(Corrupt, match="expected"):
        receiver.finish()
    receiver.close()


@pytest.mark.parametrize("rows", [0, 1, 999, 5000])
def test_key_rows_come_back_in_order_whether_they_fit_into_memory_or_not(tmp_path: Path, rows: int) -> None:
    random = np.random.default_rng(rows)
    hi = random.integers(0, 1 << 63, rows, np.uint64) * np.uint64(2)
    hi[: rows // 3] = 5 << 60  # many rows of one key
    word = np.arange(rows, dtype=np.uint64)
    runs = KeyRuns(RealDisk(tmp_path), str(tmp_path / "rows"), run_rows=1000)
    for at in range(0, rows, 300):
        runs.add(hi[at : at + 300], word[at : at + 300])
    found = list(runs.portions())
    runs.close()
    order = np.lexsort((word, hi))
    assert np.array_equal(np.concatenate([h for h, _ in found] or [hi]), hi[order])
    assert np.array_equal(np.concatenate([w for _, w in found] or [word]), word[order])
    assert list(tmp_path.iterdir()) == []

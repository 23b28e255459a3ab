"""The files of a compacted log, pinned: a change of their bytes must fail here. Golden files are only added to."""

import os
from pathlib import Path

import numpy as np
import pytest

from firn_node.compaction import mask
from firn_node.compaction.manifest import decode
from support.compaction_kit import Partition

GOLDEN = Path(__file__).parent / "golden"
NAMES = {
    "compacted-segment.bin": lambda m: m.segments[0].name,
    "compacted-mask.bin": lambda m: m.segments[0].mask,
    "compacted-dirty.bin": lambda m: m.dirty[0].name,
    "compacted-manifest.bin": lambda m: "MANIFEST",
}


def make(folder):
    """Two keys compacted, one of them deleted since, one record dirty and sealed."""
    partition = Partition(folder)
    partition.append(
        [b"a", b"b", b"a"],
        [b"one", b"two", b"three"],
        tags=["t", None, None],
        headers=[None, None, {"h": "v"}],
    )
    partition.append([b"c%d" % i for i in range(10)], [b"value"] * 10)
    partition.compact()
    partition.now.ms += 5
    partition.append([b"b"], [None])
    partition.compact(retention=1_000)
    partition.append([b"d"], [b"dirty"])
    partition.seal()
    return partition


@pytest.mark.parametrize("golden", NAMES)
def test_the_files_of_a_compacted_log_are_byte_for_byte_the_golden_ones(tmp_path, golden):
    partition = make(str(tmp_path))
    found = Path(partition.folder, NAMES[golden](partition.compacted.manifest)).read_bytes()
    path = GOLDEN / golden
    if os.environ.get("FIRN_WRITE_GOLDEN") and not path.exists():
        path.write_bytes(found)
    assert found == path.read_bytes()


def test_a_folder_of_golden_files_is_read(tmp_path):
    partition = make(str(tmp_path))
    manifest = decode((GOLDEN / "compacted-manifest.bin").read_bytes(), file="golden")
    assert manifest == partition.compacted.manifest
    for golden, name in NAMES.items():
        Path(partition.folder, name(manifest)).write_bytes((GOLDEN / golden).read_bytes())
    partition.open()
    partition.check()


def test_the_bits_of_a_mask_are_numbered_from_the_lowest_bit_of_the_first_byte():
    bits = np.zeros(8, np.uint8)
    bits[0] = 0b101
    data = mask.encode(bits, 11)
    assert data[24:] == b"\x05" + bytes(7)
    assert mask.rows_of(mask.decode(data, file="x", rows=11, masked=2), 0, 4).tolist() == [
        True,
        False,
        True,
        False,
    ]

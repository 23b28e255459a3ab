"""The bytes on disk, pinned: a change of a format must fail here."""

from firn_node.index import Entry
from firn_node.index import rockskeys as k
from firn_node.index.filesformat import (
    PartitionRow,
    Snapshot,
    pack_entry,
    pack_snapshot,
    unpack_entry,
    unpack_snapshot,
)

ENTRY = Entry(10, 20, 256, 100, 0, 5)


def test_the_rocksdb_entry_of_the_documentation_has_these_bytes() -> None:
    key = k.pack_entry_key(k.ENTRIES, 8, 1, 19)
    value = k.pack_entry(10, 256, 100, 0, 5)
    assert key.hex() == "650000000000000008000000010000000000000013"
    assert value.hex() == "0a00000000000000000100000000000064000000000000000500000000000000"
    assert k.entry_of(key, value) == ENTRY


def test_a_light_queue_key_holds_the_names_length_so_that_no_name_continues_another() -> None:
    assert k.light_prefix(8, 1, "ab").hex() == "6c000000000000000800000001026162"
    assert not k.light_prefix(8, 1, "ab").startswith(k.light_prefix(8, 1, "a"))


def test_the_bytes_of_the_file_index_are_these() -> None:
    packed = pack_entry(ENTRY)
    assert packed[:40].hex() == (
        "0a000000000000001400000000000000000100000000000064000000000000000500000000000000"
    )
    assert len(packed) == 48
    assert unpack_entry(packed, "f", 0) == ENTRY
    snapshot = Snapshot(300, 100, {(8, 1): PartitionRow(1, 2, 20, 5)}, {(8, 1): b"s"}, {(8, 1, 7): b"p"})
    data = pack_snapshot(snapshot)
    assert data[:28].hex() == "46494458010000002c0100000000000064000000000000003e000000"
    assert data[32:].hex() == (
        "93" "c42c" "0800000000000000" "01000000" "0100000000000000" "0200000000000000"
        "1400000000000000" "0500000000000000" "91" "93" "08" "01" "c40173" "91" "94" "08" "01" "07" "c40170"
    )  # fmt: skip
    assert unpack_snapshot(data, "f") == snapshot

"""Batch format v1: golden files pin its bytes, round trips hold for any records, and damage is refused.

A golden file is only ever added. ``python tests/format/test_batch_format.py NEW`` writes the ones that are
missing; an existing one is never written again.
"""

import contextlib
import re
import struct
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from firn.batch import (
    HEADER_BYTES,
    Batch,
    Codec,
    Codecs,
    Columns,
    Flag,
    Identity,
    columns_of,
    encode,
    parse_header,
)
from firn.errors import Corrupt, FirnError, Invalid, MalformedBatch

GOLDEN = Path(__file__).parent / "golden"
FORMATS = Path(__file__).parents[2] / "docs" / "formats.md"
STAMP = 1_357_034_400_000  # 2013-01-01T10:00:00Z


def _sparse(columns: Columns, offsets: list[int]) -> Columns:
    return Columns(
        **{
            **{name: getattr(columns, name) for name in Columns.__slots__},
            "offsets": np.array(offsets, np.int64),
        }
    )


def _one() -> bytes:
    """The worked example of docs/formats.md."""
    return encode(
        columns_of([b"N14228"], [b"EWR-IAH"], STAMP, base_offset=17),
        Identity(topic_id=4096, partition=2, epoch=1, producer_id=9, sequence=5, append_timestamp=STAMP + 1),
    )


def _tombstones() -> bytes:
    columns = columns_of(
        [b"a", b"", b"a"], [b"1", None, None], [STAMP, STAMP - 5, STAMP + 5], base_offset=100
    )
    return encode(columns, Identity(topic_id=8, partition=0, epoch=3))


def _everything() -> bytes:
    n = 6
    columns = columns_of(
        [b"key-%d" % i for i in range(n)],
        [None if i == 3 else b"value-%d" % i for i in range(n)],
        [STAMP + i for i in range(n)],
        tags=["red", None, "blue", "", "grün", None],
        queues=[["device-17"], [], ["device-17", "device-18"], [], [], ["ü"]],
        headers=[{"b": "2", "a": "1"}, None, {}, None, {"k": "ü"}, None],
    )
    identity = Identity(topic_id=1 << 40, partition=7, epoch=2, flags=Flag.REBUILT)
    return encode(_sparse(columns, [10, 11, 15, 16, 1000, 70_000]), identity)


# Compressed golden files are for reading only: another version of a codec may pack the same bytes otherwise.
WRITTEN = {"batch-one": _one, "batch-tombstones": _tombstones, "batch-everything": _everything}


def _packed(codec: int) -> bytes:
    columns = columns_of(
        [b"compressible-key-%03d" % (i % 3) for i in range(64)],
        [b"compressible value " * 4] * 64,
        STAMP,
        headers=[{"header": "compressible"}] * 64,
    )
    return encode(columns, Identity(topic_id=16, partition=1), Codecs(codec, codec, codec))


READ = {"batch-lz4": lambda: _packed(Codec.LZ4), "batch-zstd": lambda: _packed(Codec.ZSTD)}


def _golden(name: str) -> bytes:
    return (GOLDEN / f"{name}.bin").read_bytes()


@pytest.mark.parametrize("name", list(WRITTEN))
def test_a_batch_is_written_with_the_bytes_of_its_golden_file(name: str) -> None:
    assert WRITTEN[name]() == _golden(name)


@pytest.mark.parametrize("name", list(WRITTEN) + list(READ))
def test_a_golden_file_reads_as_the_records_it_was_made_of(name: str) -> None:
    found, made = Batch(_golden(name)), Batch((WRITTEN | READ)[name]())
    found.verify()
    assert found.key_list() == made.key_list()
    assert found.value_list() == made.value_list()
    assert found.tag_list() == made.tag_list()
    assert found.queue_list() == made.queue_list()
    assert found.header_list() == made.header_list()
    assert found.columns.offsets.tolist() == made.columns.offsets.tolist()
    assert found.columns.timestamps.tolist() == made.columns.timestamps.tolist()


def test_the_compressed_golden_files_are_compressed() -> None:
    for name, codec in (("batch-lz4", Codec.LZ4), ("batch-zstd", Codec.ZSTD)):
        header = Batch(_golden(name)).header
        assert (header.keys_codec, header.headers_codec, header.values_codec) == (codec, codec, codec)


def test_the_golden_file_with_everything_has_every_optional_column() -> None:
    wanted = Flag.HAS_TAGS | Flag.HAS_QUEUES | Flag.HAS_HEADERS | Flag.OFFSETS_SPARSE | Flag.REBUILT
    assert Batch(_golden("batch-everything")).header.flags == wanted


def test_the_worked_example_of_the_documentation_is_the_golden_file() -> None:
    text = FORMATS.read_text(encoding="utf-8")
    block = text.split("<!-- worked example: batch-one -->", 1)[1].split("```", 2)[1]
    rows = re.findall(r"^([0-9a-f]{4})  ((?:[0-9a-f]{2} ?)+)", block, re.MULTILINE)
    assert [int(at, 16) for at, _ in rows] == list(
        np.cumsum([0] + [len(bytes.fromhex(r)) for _, r in rows[:-1]])
    )
    assert b"".join(bytes.fromhex(row) for _, row in rows) == _golden("batch-one")


RECORDS = st.lists(
    st.tuples(
        st.binary(max_size=20),
        st.none() | st.binary(max_size=60),
        st.integers(0, 1 << 50),
        st.none() | st.text(max_size=8),
        st.lists(st.text(min_size=1, max_size=8), max_size=3),
        st.none() | st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=3),
    ),
    min_size=1,
    max_size=40,
)
CODECS = st.builds(Codecs, *[st.sampled_from(list(Codec))] * 3)


@given(RECORDS, CODECS, st.integers(0, 1 << 60), st.data())
def test_any_records_come_back_as_they_were(
    records: list[Any], codecs: Codecs, base: int, data: st.DataObject
) -> None:
    keys, values, stamps, tags, queues, headers = (list(column) for column in zip(*records, strict=True))
    columns = columns_of(keys, values, stamps, tags=tags, queues=queues, headers=headers, base_offset=base)
    if data.draw(st.booleans()):
        gaps = data.draw(st.lists(st.integers(1, 1000), min_size=len(keys), max_size=len(keys)))
        columns = _sparse(columns, [base + at for at in np.cumsum(gaps).tolist()])
    raw = encode(columns, Identity(topic_id=8, partition=1), codecs)
    batch = Batch(raw)
    batch.verify()
    assert len(raw) % 8 == 0
    assert batch.key_list() == keys
    assert batch.value_list() == values
    assert batch.tag_list() == tags
    assert batch.queue_list() == [tuple(names) for names in queues]
    assert batch.header_list() == [h or {} for h in headers]
    assert batch.columns.timestamps.tolist() == stamps
    assert batch.columns.offsets.tolist() == columns.offsets.tolist()
    h = batch.header
    assert (h.base_offset, h.last_offset) == (columns.offsets[0], columns.offsets[-1])
    assert (h.min_timestamp, h.max_timestamp) == (min(stamps), max(stamps))


@given(RECORDS, CODECS)
def test_the_keys_projection_alone_gives_keys_and_lengths(records: list[Any], codecs: Codecs) -> None:
    keys, values = [r[0] for r in records], [r[1] for r in records]
    raw = encode(columns_of(keys, values, STAMP), Identity(topic_id=8, partition=1), codecs)
    part = Batch(raw[: HEADER_BYTES + parse_header(raw).keys_bytes])
    part.verify()
    assert part.key_list() == keys
    assert part.columns.tombstones.tolist() == [value is None for value in values]


@given(st.integers(0, 40), st.data())
def test_keys_and_values_of_one_width_come_back_with_their_zeros(width: int, data: st.DataObject) -> None:
    same = st.lists(
        st.binary(min_size=width, max_size=width).map(lambda b: b[: width // 2].ljust(width, b"\0"))
    )
    values = data.draw(same.filter(len))
    batch = Batch(encode(columns_of(values, values, STAMP), Identity(topic_id=8, partition=1)))
    assert batch.key_list() == batch.value_list() == values
    keys_part = Batch(batch.data[: HEADER_BYTES + batch.header.keys_bytes])
    assert keys_part.key_list() == values
    assert keys_part.value_list() == [b""] * len(values)


def _read_all(raw: bytes) -> None:
    batch = Batch(raw)
    batch.verify()
    batch.key_list(), batch.value_list(), batch.tag_list(), batch.queue_list(), batch.header_list()


@pytest.mark.parametrize("name", ["batch-one", "batch-everything"])
def test_every_flipped_bit_of_a_batch_is_found(name: str) -> None:
    whole = _golden(name)
    for at in range(len(whole)):
        for bit in (0, 3, 7):
            damaged = bytearray(whole)
            damaged[at] ^= 1 << bit
            with pytest.raises((MalformedBatch, Corrupt)):
                _read_all(bytes(damaged))


@pytest.mark.parametrize("name", list(WRITTEN))
def test_a_batch_cut_short_anywhere_is_refused(name: str) -> None:
    whole = _golden(name)
    keys_end = HEADER_BYTES + parse_header(whole).keys_bytes
    for end in range(len(whole)):
        if end != keys_end:
            with pytest.raises(MalformedBatch):
                _read_all(whole[:end])


def _with_header(raw: bytes, at: int, form: str, value: int) -> bytes:
    """A changed header field under a CRC that is right again: what a hostile writer can make."""
    from firn.batch import header_crc

    changed = bytearray(raw)
    struct.pack_into(form, changed, at, value)
    struct.pack_into("<I", changed, 8, header_crc(changed))
    return bytes(changed)


@pytest.mark.parametrize(
    ("at", "form", "value", "named"),
    [
        (0, "<I", 1, "magic"),
        (4, "<H", 2, "version: expected 1, found 2"),
        (6, "<H", 1 << 12, "flags"),
        (6, "<H", 3, "flags"),
        (12, "<I", 105, "size"),
        (16, "<I", 8, "size"),
        (20, "<I", 0, "records"),
        (20, "<I", 1 << 31, "columns add up"),
    ],
)
def test_an_unknown_or_impossible_header_field_is_refused_by_name(
    at: int, form: str, value: int, named: str
) -> None:
    with pytest.raises(MalformedBatch, match=named):
        _read_all(_with_header(_golden("batch-one"), at, form, value))


@settings(max_examples=300)
@given(st.sampled_from(sorted(WRITTEN | READ)), st.data())
def test_bytes_of_a_hostile_writer_raise_nothing_but_errors_of_firn(name: str, data: st.DataObject) -> None:
    """The CRCs are made right again after the change, so that every decoder meets the bytes."""
    from firn.crc import crc32c

    raw = bytearray(_golden(name))
    header = parse_header(raw)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(HEADER_BYTES, len(raw) - 1))
        raw[at] = data.draw(st.integers(0, 255))
    split = HEADER_BYTES + header.keys_bytes
    struct.pack_into("<II", raw, 24, crc32c(bytes(raw[HEADER_BYTES:split])), crc32c(bytes(raw[split:])))
    changed = _with_header(bytes(raw), 20, "<I", data.draw(st.sampled_from([header.records, 1, 2, 65_536])))
    with contextlib.suppress(FirnError):
        batch = Batch(changed)
        batch.verify()
        assert batch.columns.records == batch.header.records
        batch.key_list(), batch.value_list()


@pytest.mark.parametrize("damage", [b"\x80", b"\xff\xff"])
def test_tags_that_are_not_text_are_refused_as_a_malformed_batch(damage: bytes) -> None:
    from firn.batch import decode_tags

    with pytest.raises(MalformedBatch):
        decode_tags(struct.pack("<i", len(damage)) + damage, 1)


@given(st.binary(max_size=300))
def test_random_bytes_are_never_a_batch(raw: bytes) -> None:
    with pytest.raises(MalformedBatch):
        _read_all(raw)


def test_a_null_key_is_refused_with_the_index_of_its_record() -> None:
    with pytest.raises(Invalid, match="record 1: "):
        columns_of([b"a", None], [b"", b""], 0)  # type: ignore[list-item]


def test_a_batch_without_records_is_refused() -> None:
    with pytest.raises(Invalid, match="at least one record"):
        encode(columns_of([], [], 0), Identity(topic_id=8, partition=0))


if __name__ == "__main__" and sys.argv[1:] == ["NEW"]:
    GOLDEN.mkdir(exist_ok=True)
    for made_name, make in (WRITTEN | READ).items():
        path = GOLDEN / f"{made_name}.bin"
        if not path.exists():
            path.write_bytes(make())
            print(f"wrote {path.name}: {path.stat().st_size} bytes")

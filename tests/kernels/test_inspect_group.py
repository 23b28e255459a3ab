"""Groups of batches: the kernel's verdict, fingerprints and stamps against ``firn.batch``."""

import struct
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from firn import batch as fb
from firn import limits
from firn.batch import Codecs, Flag, Identity, columns_of
from firn.crc import crc32c
from firn.errors import FirnError, Invalid, LimitExceeded, MalformedBatch
from firn_node.kernels import Fault, fault_error, fingerprint, inspect_group, secret_of, stamp_group

SECRET = secret_of(b"0123456789abcdef")


def encoded(
    keys: list[bytes], values: list[bytes | None] | None = None, *, times: Any = 5, **more: Any
) -> bytes:
    identity = Identity(topic_id=more.pop("topic_id", 64), partition=more.pop("partition", 3), producer_id=8)
    codecs = more.pop("codecs", None)
    return fb.encode(columns_of(keys, values or [b"v"] * len(keys), times, **more), identity, codecs)


def resealed(data: bytearray) -> bytearray:
    """The bytes of one batch with all CRCs made right again."""
    split = fb.HEADER_BYTES + struct.unpack_from("<I", data, 16)[0]
    if fb.HEADER_BYTES <= split <= len(data):
        struct.pack_into("<II", data, 24, crc32c(data[fb.HEADER_BYTES : split]), crc32c(data[split:]))
    struct.pack_into("<I", data, 8, fb.header_crc(data))
    return data


def changed(data: bytes, at: int, form: str, *values: int) -> bytearray:
    """A batch with a number replaced and all CRCs made right."""
    out = bytearray(data)
    struct.pack_into(form, out, at, *values)
    return resealed(out)


def decode_everything(data: bytes) -> fb.Batch:
    """All that a reader may ask of a batch; raises when any of it cannot be decoded."""
    batch = fb.Batch(data)
    batch.verify()
    h, c = batch.header, batch.columns
    assert h.size <= limits.BATCH_BYTES_MAX
    assert h.records <= limits.BATCH_RECORDS_MAX
    assert c.key_lengths.max() <= limits.KEY_BYTES_MAX
    assert c.value_lengths.max() <= limits.VALUE_BYTES_MAX
    batch.key_list(), batch.value_list(), batch.tag_list(), batch.queue_list()
    for headers in batch.header_list():
        assert isinstance(headers, dict)
        assert all(isinstance(text, str) for pair in headers.items() for text in pair)
    return batch


texts = st.text(max_size=6)
codecs = st.builds(Codecs, st.integers(0, 2), st.integers(0, 2), st.integers(0, 2))


@st.composite
def batches(draw: Any) -> bytes:
    n = draw(st.integers(1, 12))
    some = draw(st.integers(0, 7))
    lists = {"min_size": n, "max_size": n}
    keys = draw(st.lists(st.binary(max_size=20), **lists))
    return encoded(
        [key * draw(st.sampled_from([1, 30])) for key in keys],
        draw(st.lists(st.none() | st.binary(max_size=20).map(lambda v: v * 10), **lists)),
        times=draw(st.lists(st.integers(-(1 << 62), 1 << 62), **lists)),
        tags=draw(st.lists(st.none() | texts, **lists)) if some & 1 else None,
        queues=draw(st.lists(st.lists(st.text(min_size=1, max_size=6), max_size=3), **lists)) if some & 2 else None,
        headers=draw(st.lists(st.none() | st.dictionaries(texts, texts, max_size=3), **lists)) if some & 4 else None,
        codecs=draw(codecs),
        topic_id=draw(st.sampled_from([8, 2**64 - 8])),
        base_offset=draw(st.integers(0, 100)),
    )  # fmt: skip


@given(st.lists(batches(), max_size=5))
@settings(max_examples=100, deadline=None)
def test_every_encoded_group_is_accepted_with_the_headers_and_fingerprints_of_its_batches(
    parts: list[bytes],
) -> None:
    group = inspect_group(b"".join(parts), SECRET)
    assert group.fault.tolist() == [Fault.OK] * len(parts)
    assert [bytes(group.bytes_of(i)) for i in range(len(group))] == parts
    for i, part in enumerate(parts):
        batch = decode_everything(part)
        for name in (
            "records",
            "flags",
            "topic_id",
            "partition",
            "producer_id",
            "min_timestamp",
            "max_timestamp",
        ):
            assert getattr(group, name)[i] == getattr(batch.header, name)
        hi, lo = fingerprint(batch.columns.keys, batch.columns.key_lengths, batch.header.topic_id, SECRET)
        rows = group.rows(i)
        assert group.hi[rows].tolist() == hi.tolist()
        assert group.lo[rows].tolist() == lo.tolist()
        assert group.tombstone[rows].tolist() == batch.columns.tombstones.tolist()
        tags = set(batch.tag_list())
        only = tags.pop() if len(tags) == 1 else None
        assert group.tag_hash[i] == (crc32c(only.encode()) if only is not None else 0)
    assert len(group.hi) == sum(int(n) for n in group.records)


@given(st.lists(batches(), min_size=1, max_size=3), st.data())
@settings(max_examples=300, deadline=None)
def test_no_mutation_is_accepted_that_firn_batch_refuses(parts: list[bytes], data: Any) -> None:
    """Bytes are overwritten anywhere; half of the time the CRCs are made right afterwards, as a liar would."""
    which = data.draw(st.integers(0, len(parts) - 1))
    victim = bytearray(parts[which])
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(victim) - 1) | st.integers(0, min(len(victim), 170) - 1))
        victim[at] = data.draw(st.integers(0, 255) | st.sampled_from([0, 1, 0x7F, 0x80, 0xFF]))
    if data.draw(st.booleans()):
        resealed(victim)
    raw = b"".join([*parts[:which], victim, *parts[which + 1 :]])
    raw = raw[: len(raw) - data.draw(st.sampled_from([0, 0, 0, 1, 8, 100]))]
    group = inspect_group(raw, SECRET)
    assert int(group.size.sum()) == len(raw)
    for i in range(len(group)):
        if group.fault[i] == Fault.OK:
            decode_everything(bytes(group.bytes_of(i)))
        else:
            assert isinstance(fault_error(group, i), FirnError)


ONE = encoded([b"key", b"other"], [b"value", None], times=[5, 9])
LENGTHS, KEY_LENGTHS = fb.HEADER_BYTES, fb.HEADER_BYTES + fb.LENGTHS_BYTES
TAGGED = encoded([b"k"] * 2, tags=["red", "blue"])
QUEUED = encoded([b"k"] * 2, queues=[["a", "b"], ["c"]])
HEADED = encoded([b"k"] * 2, headers=[{"a": "b"}, None])
COLUMN = KEY_LENGTHS + 8 + 8 + 16 + 8  # of a batch of two records with keys of up to 8 bytes together

REFUSED = {
    "magic": (changed(ONE, 0, "<I", 1), Fault.NOT_A_BATCH, "magic"),
    "version": (changed(ONE, 4, "<H", 2), Fault.NOT_A_BATCH, "version"),
    "header crc": (bytearray(ONE[:8]) + b"\1\2\3\4" + ONE[12:], Fault.NOT_A_BATCH, "header CRC"),
    "half a header": (bytearray(ONE[:50]), Fault.NOT_A_BATCH, "header"),
    "unknown flag": (changed(ONE, 6, "<H", 1 << 12), Fault.HEADER, "flags"),
    "codec 3": (changed(ONE, 6, "<H", 3 << 4), Fault.HEADER, "flags"),
    "no records": (changed(ONE, 20, "<I", 0), Fault.HEADER, "records"),
    "keys part": (changed(ONE, 16, "<I", 24), Fault.HEADER, "keys part"),
    "keys bytes": (bytearray(ONE[:KEY_LENGTHS]) + b"\7" + ONE[KEY_LENGTHS + 1 :], Fault.KEYS_CRC, "keys CRC"),
    "value bytes": (bytearray(ONE[:-8]) + b"\7" + ONE[-7:], Fault.VALUES_CRC, "values CRC"),
    "more records": (changed(ONE, 20, "<I", 9), Fault.STRUCTURE, "add up"),
    "keys stored": (changed(ONE, LENGTHS, "<I", 80), Fault.STRUCTURE, "add up"),
    "values stored": (changed(ONE, LENGTHS + 16, "<II", 4, 4), Fault.STRUCTURE, "lengths add up"),
    "impossible ratio": (changed(changed(ONE, LENGTHS, "<II", 8, 9), 6, "<H", 1), Fault.STRUCTURE, "add up"),
    "null key": (changed(ONE, KEY_LENGTHS + 4, "<i", -1), Fault.NULL_KEY, "record 1: the key is null"),
    "negative key": (changed(ONE, KEY_LENGTHS, "<i", -2), Fault.STRUCTURE, "key length -2"),
    "negative value": (changed(ONE, KEY_LENGTHS + 8, "<i", -2), Fault.STRUCTURE, "value length -2"),
    "key lengths": (changed(ONE, KEY_LENGTHS, "<i", 9), Fault.STRUCTURE, "key lengths add up"),
    "long key": (changed(ONE, KEY_LENGTHS + 4, "<i", 65_537), Fault.KEY_LIMIT, "record 1: a key"),
    "long value": (changed(ONE, KEY_LENGTHS + 8, "<i", (16 << 20) + 1), Fault.VALUE_LIMIT, "record 0: a value"),
    "timestamps": (changed(ONE, 88, "<q", 10), Fault.STRUCTURE, "timestamps"),
    "dense offsets": (changed(ONE, 56, "<q", 7), Fault.STRUCTURE, "offsets"),
    "offsets wrap": (changed(ONE, 48, "<qq", 1 << 62, -(1 << 62)), Fault.STRUCTURE, "offsets"),
    "flag without column": (changed(ONE, 6, "<H", Flag.HAS_TAGS), Fault.STRUCTURE, "flags"),
    "column without flag": (changed(TAGGED, 6, "<H", 0), Fault.STRUCTURE, "flags"),
    "tag length": (changed(TAGGED, COLUMN, "<i", -2), Fault.STRUCTURE, "record 0"),
    "tag too short": (changed(TAGGED, COLUMN, "<i", 2), Fault.STRUCTURE, "contradict"),
    "tag past the end": (changed(TAGGED, COLUMN + 4, "<i", 100), Fault.STRUCTURE, "record 1"),
    "tag text": (changed(TAGGED, COLUMN + 8, "<B", 0xFF), Fault.TEXT, "record 0"),
    "long tag": (bytearray(encoded([b"k"], tags=["t" * 256])), Fault.TAG_LIMIT, "record 0: a tag"),
    "queue count": (changed(QUEUED, COLUMN, "<H", 60), Fault.STRUCTURE, "contradict"),
    "queue name length": (changed(QUEUED, COLUMN + 4, "<H", 2), Fault.STRUCTURE, "contradict"),
    "queue name text": (changed(QUEUED, COLUMN + 12, "<B", 0x80), Fault.TEXT, "record 1"),
    "empty queue name": (changed(QUEUED, COLUMN + 4, "<HH", 0, 2), Fault.QUEUES_LIMIT, "record 0"),
    "many queues": (bytearray(encoded([b"a", b"k"], queues=[[], ["q"] * 65])), Fault.QUEUES_LIMIT, "record 1"),
    "long queue name": (bytearray(encoded([b"k"], queues=[["q" * 256]])), Fault.QUEUES_LIMIT, "record 0"),
    "headers map": (changed(HEADED, COLUMN + 8, "<B", 0x91), Fault.TEXT, "record 0"),
    "headers text": (changed(HEADED, COLUMN + 10, "<B", 0xFE), Fault.TEXT, "record 0"),
    "headers length": (changed(HEADED, COLUMN, "<i", -1), Fault.STRUCTURE, "contradict"),
    "large headers": (bytearray(encoded([b"k"], headers=[{"a": "b" * 65_536}])), Fault.HEADERS_LIMIT, "headers"),
    "many records": (bytearray(encoded([b""] * 65_537, [b""] * 65_537)), Fault.BATCH_LIMIT, "65536 records"),
    "large batch": (bytearray(encoded([b"k"] * 3, [bytes(12 << 20)] * 3)), Fault.BATCH_LIMIT, "bytes"),
    "large when decompressed": (
        bytearray(encoded([b"k"] * 3, [bytes(12 << 20)] * 3, codecs=Codecs(values=2))),
        Fault.BATCH_LIMIT,
        "decompressed",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_faulty_batch_is_refused_with_its_fault_and_the_others_are_not(name: str) -> None:
    bad, fault, words = REFUSED[name]
    group = inspect_group(ONE + bytes(bad) + TAGGED, SECRET)
    rest = [] if fault == Fault.NOT_A_BATCH else [Fault.OK]
    assert [Fault(f) for f in group.fault] == [Fault.OK, fault, *rest]
    assert group.rows(1) == slice(2, 2)
    assert int(group.size.sum()) == len(group.data)
    assert words in str(fault_error(group, 1))
    assert "batch 1: " in str(fault_error(group, 1))
    alone = inspect_group(bad, SECRET)
    assert "batch 0" not in str(fault_error(alone, 0))
    if rest:
        assert group.rows(2) == slice(2, 4)


def test_faults_have_the_error_class_that_tells_the_producer_what_to_do() -> None:
    kinds = {name: type(fault_error(inspect_group(REFUSED[name][0], SECRET), 0)) for name in REFUSED}
    assert kinds["null key"] is Invalid
    assert kinds["long key"] is kinds["many queues"] is kinds["large batch"] is LimitExceeded
    assert kinds["magic"] is kinds["keys bytes"] is kinds["tag text"] is MalformedBatch


@pytest.mark.parametrize("column", ["keys", "headers", "values"])
@pytest.mark.parametrize("codec", [fb.Codec.LZ4, fb.Codec.ZSTD])
def test_a_column_that_does_not_decompress_is_refused(column: str, codec: int) -> None:
    whole = encoded(
        [b"k" * 300] * 4, [b"v" * 300] * 4, headers=[{"h": "x" * 300}] * 4, codecs=Codecs(**{column: codec})
    )
    lengths = np.frombuffer(whole, "<u4", 8, LENGTHS).tolist()
    split = fb.HEADER_BYTES + struct.unpack_from("<I", whole, 16)[0]
    at = {"keys": KEY_LENGTHS + 16 + 16 + 32, "headers": split - fb.padded(lengths[2]), "values": split}[
        column
    ]
    assert inspect_group(whole, SECRET).fault.tolist() == [Fault.OK]
    broken = bytearray(whole)
    broken[at : at + 8] = bytes(b ^ 0xFF for b in broken[at : at + 8])
    group = inspect_group(ONE + bytes(resealed(broken)) + ONE, SECRET)
    assert [Fault(f) for f in group.fault] == [Fault.OK, Fault.UNDECODABLE, Fault.OK]
    assert "compressed column" in str(fault_error(group, 1))
    assert group.hi[group.rows(2)].tolist() == group.hi[group.rows(0)].tolist()


def test_compressed_headers_are_checked_as_plain_ones_are() -> None:
    plain = encoded([b"k"] * 40, headers=[{"a": "b"}] * 40)
    columns = fb.Batch(plain).columns
    bad = bytearray(columns.headers)
    bad[160 + 5 * 7] = 0x91  # record 7's map becomes an array
    columns = fb.Columns(**{n: getattr(columns, n) for n in columns.__slots__} | {"headers": bytes(bad)})
    group = inspect_group(fb.encode(columns, Identity(topic_id=8, partition=0), Codecs(headers=2)), SECRET)
    assert group.flags[0] >> 2 & 3 == 2
    assert (Fault(group.fault[0]), int(group.detail[0])) == (Fault.TEXT, 7)


def test_what_is_stored_is_not_held_to_the_produce_limits() -> None:
    stored = encoded(
        [b"k" * 70_000], [b"v"], tags=["t" * 300], queues=[["q" * 300] * 70], headers=[{"a": "b" * 70_000}]
    )
    assert inspect_group(stored, SECRET).fault.tolist() == [Fault.KEY_LIMIT]
    assert inspect_group(stored, SECRET, is_produce=False).fault.tolist() == [Fault.OK]


@pytest.mark.parametrize(
    ("deltas", "fault"), [([0, 2, 9], 0), ([0, 0, 9], 5), ([0, 9, 9], 5), ([1, 2, 9], 5), ([0, 2, 8], 5)]
)
def test_sparse_offsets_ascend_from_zero_to_the_last(deltas: list[int], fault: int) -> None:
    columns = columns_of([b"a", b"b", b"c"], [b"v"] * 3, 5)
    columns = fb.Columns(
        **{n: getattr(columns, n) for n in columns.__slots__} | {"offsets": np.array([50, 52, 59])}
    )
    whole = fb.encode(columns, Identity(topic_id=8, partition=0))
    at = KEY_LENGTHS + 16 + 16 + 24
    group = inspect_group(changed(whole, at, "<3I", *deltas), SECRET)
    assert group.fault.tolist() == [fault]


@pytest.mark.parametrize("text", ["", "aé", "日本", "\U0001f600x", "\U0010ffff", "\ud7ff\ue000"])
def test_valid_utf8_tags_pass(text: str) -> None:
    group = inspect_group(encoded([b"k"], tags=[text]), SECRET)
    assert group.fault.tolist() == [Fault.OK]
    assert group.tag_hash[0] == crc32c(text.encode())


@pytest.mark.parametrize(
    "raw", ["c0af", "eda080", "f4908080", "f08080af", "e28200", "c3", "80", "ff", "e0a0", "f5808080"]
)
def test_what_python_refuses_to_decode_as_utf8_is_no_tag(raw: str) -> None:
    text = bytes.fromhex(raw)
    with pytest.raises(UnicodeDecodeError):
        text.decode()
    whole = encoded([b"k"], tags=["x" * len(text)])
    at = KEY_LENGTHS + 8 + 8 + 8 + 8 + 4
    assert inspect_group(changed(whole, at, f"{len(text)}B", *text), SECRET).fault.tolist() == [Fault.TEXT]


@given(
    st.lists(st.tuples(batches(), st.integers(0, 1 << 50)), min_size=1, max_size=4), st.integers(0, 1 << 31)
)
@settings(max_examples=60, deadline=None)
def test_stamped_batches_are_what_firn_batch_would_have_written(
    parts: list[tuple[bytes, int]], epoch: int
) -> None:
    data = bytearray(b"".join(part for part, _ in parts))
    group = inspect_group(data, SECRET)
    stamp_group(data, group, np.array([base for _, base in parts]), epoch, 123_456)
    for i, (found, (part, base)) in enumerate(zip(fb.iterate(data), parts, strict=True)):
        header = fb.parse_header(part)
        expected = replace(
            header,
            base_offset=base,
            last_offset=base + header.records - 1,
            epoch=epoch,
            append_timestamp=123_456,
        )
        assert found.header == expected
        assert bytes(found.data) == expected.encode() + part[fb.HEADER_BYTES :]
        assert (group.base_offset[i], group.last_offset[i]) == (base, expected.last_offset)
        assert (group.epoch[i], group.append_timestamp[i]) == (epoch, 123_456)


def test_faulty_batches_and_negative_base_offsets_are_not_stamped() -> None:
    data = bytearray(ONE + bytes(REFUSED["null key"][0]) + ONE)
    before = bytes(data)
    group = inspect_group(data, SECRET)
    stamp_group(data, group, np.array([-1, 5, 7]), 2, 3)
    assert bytes(data[: 2 * len(ONE)]) == before[: 2 * len(ONE)]
    assert fb.parse_header(data, 2 * len(ONE)).base_offset == 7


@pytest.mark.parametrize("cut", [8, 60, len(ONE) - 1])
def test_a_last_batch_that_is_cut_off_is_refused(cut: int) -> None:
    group = inspect_group(ONE + ONE[:-cut], SECRET)
    assert [Fault(f) for f in group.fault] == [Fault.OK, Fault.NOT_A_BATCH]
    assert (group.start[1], group.size[1]) == (len(ONE), len(ONE) - cut)
    assert "batch 1: " in str(fault_error(group, 1))


def test_an_empty_buffer_is_a_group_of_no_batches() -> None:
    assert len(inspect_group(b"", SECRET)) == 0


@pytest.mark.parametrize("size", [0, 1, 7, 8, 63, 1535, 1536, 1537, 5000, 100_003])
def test_both_checksum_loops_give_crc32c(size: int) -> None:
    from firn_node.kernels.checksum import crc32c_of, update_software

    data = np.random.default_rng(size).integers(0, 256, size + 3).astype(np.uint8)
    data.flags.writeable = False
    expected = crc32c(data[3:].tobytes())
    assert int(crc32c_of(data, 3, len(data))) == expected
    assert int(update_software(np.uint64(0xFFFFFFFF), data, 3, len(data))) ^ 0xFFFFFFFF == expected


def test_limits_are_those_of_firn() -> None:
    """The kernel's compiled constants, seen from outside: the longest allowed key and value pass."""
    whole = encoded([b"k" * limits.KEY_BYTES_MAX], [bytes(limits.VALUE_BYTES_MAX)], queues=[["q" * 255] * 64])
    assert inspect_group(whole, SECRET).fault.tolist() == [Fault.OK]

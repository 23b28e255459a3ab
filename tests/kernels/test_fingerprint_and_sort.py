"""Fingerprints and key index order against plain Python."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from firn.errors import MalformedBatch
from firn_node.kernels import fingerprint, secret_of, sort_key_index

MASK = (1 << 64) - 1
SECRET = bytes(range(16))


def siphash128(key: bytes, message: bytes) -> bytes:
    """SipHash-2-4 with 128-bit output, written after the reference C code."""
    k0, k1 = int.from_bytes(key[:8], "little"), int.from_bytes(key[8:], "little")
    v = [
        k0 ^ 0x736F6D6570736575,
        k1 ^ 0x646F72616E646F6D ^ 0xEE,
        k0 ^ 0x6C7967656E657261,
        k1 ^ 0x7465646279746573,
    ]

    def rotate(x: int, b: int) -> int:
        return (x << b | x >> (64 - b)) & MASK

    def rounds(n: int) -> None:
        for _ in range(n):
            v[0] = (v[0] + v[1]) & MASK
            v[1] = rotate(v[1], 13) ^ v[0]
            v[0] = rotate(v[0], 32)
            v[2] = (v[2] + v[3]) & MASK
            v[3] = rotate(v[3], 16) ^ v[2]
            v[0] = (v[0] + v[3]) & MASK
            v[3] = rotate(v[3], 21) ^ v[0]
            v[2] = (v[2] + v[1]) & MASK
            v[1] = rotate(v[1], 17) ^ v[2]
            v[2] = rotate(v[2], 32)

    whole = len(message) & ~7
    words = [int.from_bytes(message[i : i + 8], "little") for i in range(0, whole, 8)]
    words.append(int.from_bytes(message[whole:], "little") | (len(message) & 0xFF) << 56)
    for m in words:
        v[3] ^= m
        rounds(2)
        v[0] ^= m
    v[2] ^= 0xEE
    rounds(4)
    first = v[0] ^ v[1] ^ v[2] ^ v[3]
    v[1] ^= 0xDD
    rounds(4)
    return first.to_bytes(8, "little") + (v[0] ^ v[1] ^ v[2] ^ v[3]).to_bytes(8, "little")


# vectors_sip128 of the reference implementation: key 00..0f, message 00..(n - 1), for these n.
OFFICIAL = {
    0: "a3817f04ba25a8e66df67214c7550293",
    1: "da87c1d86b99af44347659119b22fc45",
    2: "8177228da4a45dc7fca38bdef60affe4",
    3: "9c70b60c5267a94e5f33b6b02985ed51",
    8: "3b62a9ba6258f5610f83e264f31497b4",
    9: "264499060ad9baabc47f8b02bb6d71ed",
    10: "00110dc378146956c95447d3f3d0fbba",
    12: "d626b266905ef35882634df68532c125",
    14: "31fcefac66d7de9c7ec7485fe4494902",
    15: "5493e99933b0a8117e08ec0f97cfc3d9",
}


@pytest.mark.parametrize("length", OFFICIAL)
def test_the_plain_reference_gives_the_official_siphash_128_vectors(length: int) -> None:
    assert siphash128(SECRET, bytes(range(length))).hex() == OFFICIAL[length]


@pytest.mark.parametrize("length", [n for n in OFFICIAL if n >= 8])
def test_the_kernel_gives_the_official_vectors_when_the_topic_id_is_the_first_eight_bytes(
    length: int,
) -> None:
    topic_id = int.from_bytes(bytes(range(8)), "little")
    key = np.arange(8, length, dtype=np.uint8)
    hi, lo = fingerprint(key, np.array([length - 8], np.int32), topic_id, secret_of(SECRET))
    expected = bytes.fromhex(OFFICIAL[length])
    assert int(hi[0]).to_bytes(8, "little") + int(lo[0]).to_bytes(4, "little") == expected[:12]


@given(
    st.lists(st.binary(max_size=40), max_size=20), st.integers(0, MASK), st.binary(min_size=16, max_size=16)
)
@settings(max_examples=100, deadline=None)
def test_fingerprints_are_keyed_siphash_of_topic_and_key(
    keys: list[bytes], topic_id: int, secret: bytes
) -> None:
    hi, lo = fingerprint(
        np.frombuffer(b"".join(keys), np.uint8),
        np.array([len(k) for k in keys], np.int32),
        topic_id,
        secret_of(secret),
    )
    for i, key in enumerate(keys):
        expected = siphash128(secret, topic_id.to_bytes(8, "little") + key)
        assert int(hi[i]) == int.from_bytes(expected[:8], "little")
        assert int(lo[i]) == int.from_bytes(expected[8:12], "little")


def test_a_long_key_and_an_unaligned_column_are_hashed_like_any_other() -> None:
    raw = np.frombuffer(b"x" + bytes(range(256)) * 256, np.uint8)[1:]
    lengths = np.frombuffer(b"z" + (65_536).to_bytes(4, "little"), np.uint8)[1:].view(np.int32)
    hi, _ = fingerprint(raw, lengths, 7, secret_of(SECRET))
    assert int(hi[0]) == int.from_bytes(
        siphash128(SECRET, (7).to_bytes(8, "little") + raw.tobytes())[:8], "little"
    )


@pytest.mark.parametrize("lengths", [[4], [-1], [2, 2], [3, -1], [2**31 - 1]])
def test_lengths_that_do_not_fit_the_key_bytes_are_refused(lengths: list[int]) -> None:
    with pytest.raises(MalformedBatch):
        fingerprint(np.zeros(3, np.uint8), np.array(lengths, np.int32), 1, secret_of(SECRET))


def reference_sort(hi: np.ndarray, word: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    order = np.lexsort((word, hi))
    return hi[order], word[order]


def check_sort(hi: np.ndarray, word: np.ndarray) -> None:
    before = hi.copy(), word.copy()
    found, expected = sort_key_index(hi, word), reference_sort(hi, word)
    assert np.array_equal(found[0], expected[0])
    assert np.array_equal(found[1], expected[1])
    assert np.array_equal(hi, before[0])
    assert np.array_equal(word, before[1])


@given(
    st.lists(st.tuples(st.integers(0, MASK), st.integers(0, MASK)), max_size=300),
    st.sampled_from([MASK, 0xF, 3 << 62]),
)
@settings(max_examples=100, deadline=None)
def test_key_indexes_sort_by_fingerprint_then_word(rows: list[tuple[int, int]], mask: int) -> None:
    check_sort(np.array([h & mask for h, _ in rows], np.uint64), np.array([w for _, w in rows], np.uint64))


@pytest.mark.parametrize("n", [63, 64, 65, 512, 513, 4096, 20_000, 300_000])
@pytest.mark.parametrize("hot", [0.0, 0.5, 1.0])
def test_large_key_indexes_with_hot_keys_in_any_order_sort(n: int, hot: float) -> None:
    draw = np.random.default_rng(n)
    hi = draw.integers(0, MASK, n, np.uint64, endpoint=True)
    hi[draw.random(n) < hot] = 0xFFFFFFFFFFFFFFFF
    check_sort(hi, draw.integers(0, MASK, n, np.uint64, endpoint=True))
    check_sort(hi, np.arange(n, dtype=np.uint64))


@pytest.mark.parametrize("groups", [1, 3, 1000])
def test_fingerprints_that_differ_in_their_lowest_bits_alone_sort_by_them(groups: int) -> None:
    draw = np.random.default_rng(groups)
    upper = draw.integers(0, MASK, groups, np.uint64, endpoint=True) & np.uint64(MASK << 13 & MASK)
    hi = upper[draw.integers(0, groups, 5000)] | draw.integers(0, 1 << 13, 5000, np.uint64)
    check_sort(hi, draw.integers(0, MASK, 5000, np.uint64, endpoint=True))
    check_sort(hi, np.arange(5000, dtype=np.uint64)[::-1].copy())

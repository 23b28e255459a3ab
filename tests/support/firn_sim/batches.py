"""Batches for tests that care about bytes and keys, not about producers."""

from firn.batch import Codecs, Identity, columns_of, encode


def batch(
    keys: list[bytes] | None = None,
    *,
    topic_id: int = 8,
    value: bytes | None = b"value",
    timestamp: int = 1_000,
    append_ms: int = 2_000,
    base_offset: int = 0,
    codec: int = 0,
) -> bytes:
    """One batch; every key has the same value."""
    keys = [b"key"] if keys is None else keys
    columns = columns_of(keys, [value] * len(keys), timestamp, base_offset=base_offset)
    identity = Identity(topic_id=topic_id, partition=0, append_timestamp=append_ms)
    return encode(columns, identity, Codecs(keys=codec, values=codec))


def sized(size: int, seed: int, **kwargs: int) -> bytes:
    """A batch of about ``size`` bytes, different for each seed."""
    return batch([b"k%d" % seed], value=bytes([seed % 251]) * max(0, size - 200), base_offset=seed, **kwargs)

"""Records of a batch by row: gathered, joined with others, encoded anew."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from firn.batch import Codecs, Columns, Flag, Identity, encode
from firn_node.kernels.compact import gather_bytes, gather_texts, readonly

U8 = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Names:
    """A column of names: how many a record has, the length of each, their bytes."""

    counts: NDArray[np.uint16]
    lengths: NDArray[np.uint16]
    data: U8


@dataclass(frozen=True, slots=True)
class Texts:
    """A column of one text per record: lengths (``absent`` for none) and bytes."""

    lengths: NDArray[np.int32]
    data: U8


@dataclass(frozen=True, slots=True)
class Piece:
    """Some records of one batch, in order. ``bytes`` is about what they take in a batch."""

    key_lengths: NDArray[np.int32]
    value_lengths: NDArray[np.int32]
    timestamps: NDArray[np.int64]
    offsets: NDArray[np.int64]
    keys: U8
    values: U8
    tags: Texts | None
    queues: Names | None
    headers: Texts | None


def piece_of(columns: Columns, rows: NDArray[np.int64] | None) -> Piece:
    """The records ``rows`` (ascending; None: all) of a batch."""
    n = columns.records
    if rows is None:
        return Piece(
            columns.key_lengths, columns.value_lengths, columns.timestamps, columns.offsets, columns.keys,
            columns.values, _texts(columns.tags, n), _names(columns.queues, n), _texts(columns.headers, n),
        )  # fmt: skip
    tags, queues, headers = _texts(columns.tags, n), _names(columns.queues, n), _texts(columns.headers, n)
    return Piece(
        columns.key_lengths[rows], columns.value_lengths[rows], columns.timestamps[rows], columns.offsets[rows],
        _gather_texts(columns.keys, columns.key_lengths, rows), _gather_texts(columns.values, columns.value_lengths, rows),
        None if tags is None else _pick_texts(tags, rows),
        None if queues is None else _pick_names(queues, rows),
        None if headers is None else _pick_texts(headers, rows),
    )  # fmt: skip


def join(pieces: Sequence[Piece], identity: Identity, codecs: Codecs) -> bytes:
    """One batch of all records of the pieces, in order."""
    columns = Columns(
        key_lengths=np.concatenate([p.key_lengths for p in pieces]),
        value_lengths=np.concatenate([p.value_lengths for p in pieces]),
        timestamps=np.concatenate([p.timestamps for p in pieces]),
        offsets=np.concatenate([p.offsets for p in pieces]),
        keys=np.concatenate([p.keys for p in pieces]),
        values=np.concatenate([p.values for p in pieces]),
        tags=_join_texts([(p.tags, len(p.offsets)) for p in pieces], absent=-1),
        queues=_join_names([(p.queues, len(p.offsets)) for p in pieces]),
        headers=_join_texts([(p.headers, len(p.offsets)) for p in pieces], absent=0),
    )
    return encode(columns, identity, codecs)


def rebuilt_identity(topic_id: int, partition: int, epoch: int, append_timestamp: int) -> Identity:
    """Who wrote a batch that compaction put together: no producer."""
    return Identity(
        topic_id=topic_id,
        partition=partition,
        epoch=epoch,
        append_timestamp=append_timestamp,
        flags=Flag.REBUILT,
    )


def _starts(lengths: NDArray[Any]) -> NDArray[np.int64]:
    found = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(np.maximum(lengths, 0), out=found[1:])
    return found


def _gather(data: U8, starts: NDArray[np.int64], rows: NDArray[np.int64]) -> U8:
    out = np.empty(int((starts[rows + 1] - starts[rows]).sum()), np.uint8)
    gather_bytes(readonly(data), readonly(starts), readonly(rows), out)
    return out


def _gather_texts(data: U8, lengths: NDArray[np.int32], rows: NDArray[np.int64]) -> U8:
    out = np.empty(int(np.maximum(lengths[rows], 0).sum(dtype=np.int64)), np.uint8)
    gather_texts(readonly(data), readonly(lengths), readonly(rows), out)
    return out


def _texts(column: Any, n: int) -> Texts | None:
    if not len(column):
        return None
    return Texts(np.frombuffer(column, "<i4", n), np.frombuffer(column, np.uint8, offset=4 * n))


def _pick_texts(texts: Texts, rows: NDArray[np.int64]) -> Texts:
    return Texts(texts.lengths[rows], _gather_texts(texts.data, texts.lengths, rows))


def _join_texts(parts: Sequence[tuple[Texts | None, int]], *, absent: int) -> bytes:
    """The column; empty when no record has a text."""
    if not any(t is not None and (t.lengths != absent).any() for t, _ in parts):
        return b""
    lengths = [np.full(n, absent, np.int32) if t is None else t.lengths for t, n in parts]
    return np.concatenate(lengths).astype("<i4").tobytes() + b"".join(
        t.data.tobytes() for t, _ in parts if t is not None
    )


def _names(column: Any, n: int) -> Names | None:
    if not len(column):
        return None
    counts = np.frombuffer(column, "<u2", n)
    total = int(counts.sum(dtype=np.int64))
    lengths = np.frombuffer(column, "<u2", total, 2 * n)
    return Names(counts, lengths, np.frombuffer(column, np.uint8, offset=2 * (n + total)))


def _pick_names(names: Names, rows: NDArray[np.int64]) -> Names:
    first = _starts(names.counts)
    bytes_at = _starts(names.lengths)[first]
    lengths = _gather(np.frombuffer(names.lengths.tobytes(), np.uint8), 2 * first, rows)
    return Names(
        names.counts[rows], np.frombuffer(lengths.tobytes(), "<u2"), _gather(names.data, bytes_at, rows)
    )


def _join_names(parts: Sequence[tuple[Names | None, int]]) -> bytes:
    if not any(p is not None and p.counts.any() for p, _ in parts):
        return b""
    counts = np.concatenate([np.zeros(n, np.uint16) if p is None else p.counts for p, n in parts])
    lengths = b"".join(p.lengths.tobytes() for p, _ in parts if p is not None)
    return (
        counts.astype("<u2").tobytes()
        + lengths
        + b"".join(p.data.tobytes() for p, _ in parts if p is not None)
    )

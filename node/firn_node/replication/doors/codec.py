"""Replica messages as bytes: the payloads of the WebSocket messages of ``/v1/replicate``.

====== ==== ========== ==========================================================================
offset type field      note
====== ==== ========== ==========================================================================
0      u8   kind       1: a message; 2: the beginning of a frame; 3: its next bytes
1      u8   reserved   0
2      u16  version    1
4      u32  head       bytes of ``head``; 0 for kind 3
8      ...  head       msgpack array ``[tag, group_id, epoch, log_id, handshake, fields...]``
...    ...  padding    zeros up to a multiple of 8; kind 2 only
...    ...  log bytes  kinds 2 and 3
====== ==== ========== ==========================================================================

``handshake`` is ``[incarnation, number, start]`` or nil; ``tag`` and ``fields`` follow from ``_LAYOUTS``, in order. A frame
announces its bytes by its two positions; what does not fit into one WebSocket message follows in kind 3. Messages of
kind 1 may come between. Epochs and positions are integers of 64 bits.

Invariants: every size is checked against the bytes that are there, and against the limits below, before anything is
kept; what is decoded has the types that the core expects.
"""

import struct
from collections.abc import Callable
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any, NamedTuple

import msgpack

from firn.batch import Buffer
from firn.errors import Invalid
from firn.limits import BATCH_BYTES_MAX
from firn.types import Epoch, Position
from firn_node.replication.messages import (
    Answer,
    Ask,
    Committed,
    EpochStart,
    Fence,
    Frame,
    Handshake,
    Header,
    Hello,
    History,
    Leave,
    Message,
    Refusal,
    Report,
    Welcome,
)
from firn_node.replication.record import GroupId, Incarnation, LogId, Member

VERSION = 1
PIECE_BYTES = 1 << 20  # of the log in one WebSocket message
HEAD_BYTES_MAX = 1 << 20
FRAME_BYTES_MAX = 2 * BATCH_BYTES_MAX  # a frame is of whole batches: PIECE_BYTES, or one larger batch
MESSAGE_BYTES_MAX = 8 + HEAD_BYTES_MAX + PIECE_BYTES
HISTORY_MAX = 65_536
_TEXT_MAX = 4096
_START = struct.Struct("<BBHI")
_MESSAGE, _FRAME, _MORE = 1, 2, 3
_MORE_START = _START.pack(_MORE, 0, VERSION, 0)


class _Kind(NamedTuple):
    """How a field's values travel. ``unpack`` raises ValueError or TypeError for anything else."""

    pack: Callable[[Any], Any]
    unpack: Callable[[Any], Any]


def _same(value: Any) -> Any:
    return value


def _whole(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise ValueError(f"expected a whole number of 63 bits, found {value!r:.80}")
    return value


def _text(value: Any) -> str:
    if type(value) is not str or len(value) > _TEXT_MAX:
        raise ValueError(f"expected text of at most {_TEXT_MAX} characters, found {value!r:.80}")
    return value


def _bool(value: Any) -> bool:
    if type(value) is not bool:
        raise ValueError(f"expected true or false, found {value!r:.80}")
    return value


def _optional(kind: _Kind) -> _Kind:
    return _Kind(
        lambda value: None if value is None else kind.pack(value),
        lambda value: None if value is None else kind.unpack(value),
    )


def _history(value: Any) -> History:
    if type(value) is not list or len(value) > HISTORY_MAX:
        raise ValueError(f"expected a list of at most {HISTORY_MAX} epochs")
    found = tuple(EpochStart(Epoch(_whole(epoch)), Position(_whole(start))) for epoch, start in value)
    for before, after in pairwise(found):
        if before.epoch >= after.epoch or before.start > after.start:
            raise ValueError(
                f"epoch {after.epoch} at {after.start} after epoch {before.epoch} at {before.start}"
            )
    return found


def _member(value: Any) -> Member:
    node, address, ordinal = value
    return Member(_text(node), _text(address), _whole(ordinal))


def _handshake(value: Any) -> Handshake:
    incarnation, number, start = value
    return Handshake(Incarnation(_text(incarnation)), _whole(number), _whole(start))


_WHOLE, _BOOL, _TEXT = _Kind(_same, _whole), _Kind(_same, _bool), _Kind(_same, _text)
_HISTORY = _Kind(lambda value: [[entry.epoch, entry.start] for entry in value], _history)
_MEMBER = _Kind(lambda value: [value.node, value.address, value.ordinal], _member)
_HANDSHAKE = _optional(_Kind(lambda value: [value.incarnation, value.number, value.start], _handshake))

# Tag, and the fields behind the header, by name. A tag is never given anew.
_LAYOUTS: dict[type, tuple[int, dict[str, _Kind]]] = {
    Hello: (1, {
        "member": _MEMBER, "history": _HISTORY, "end": _WHOLE, "committed": _WHOLE, "is_rebuilt": _BOOL,
    }),
    Welcome: (2, {"cut": _optional(_WHOLE), "end": _WHOLE, "forced_epoch": _WHOLE}),
    Refusal: (3, {"reason": _TEXT}),
    Frame: (4, {"start": _WHOLE, "end": _WHOLE, "starts": _HISTORY}),
    Report: (5, {"written": _WHOLE, "durable": _WHOLE, "is_rebuilt": _BOOL}),
    Committed: (6, {"position": _WHOLE, "end": _WHOLE}),
    Leave: (7, {"reason": _TEXT}),
    Ask: (8, {"version": _WHOLE}),
    Answer: (9, {
        "version": _WHOLE, "last_epoch": _WHOLE, "end": _WHOLE, "is_unclean": _BOOL, "may_stand": _BOOL,
    }),
    Fence: (10, {"version": _WHOLE}),
}  # fmt: skip
for _type, (_tag, _layout) in _LAYOUTS.items():
    assert [field.name for field in fields(_type)] == ["header", *_layout], _type
_BY_TAG = {tag: (kind, layout) for kind, (tag, layout) in _LAYOUTS.items()}


def encode(message: Message) -> bytes:
    """The WebSocket message of anything but a ``Frame``."""
    head = _head(message)
    return _START.pack(_MESSAGE, 0, VERSION, len(head)) + head


def frame_parts(frame: Frame, first: Buffer) -> tuple[bytes, Buffer]:
    """The parts of the WebSocket message that begins a frame; ``first`` are its first bytes of the log."""
    head = _head(frame)
    return _START.pack(_FRAME, 0, VERSION, len(head)) + head + bytes(-len(head) % 8), first


def more_parts(piece: Buffer) -> tuple[bytes, Buffer]:
    """The parts of a WebSocket message with the next bytes of a frame."""
    return _MORE_START, piece


def _head(message: Message) -> bytes:
    tag, layout = _LAYOUTS[type(message)]
    header = message.header
    values = [kind.pack(getattr(message, name)) for name, kind in layout.items()]
    found: bytes = msgpack.packb(
        [tag, header.group_id, header.epoch, header.log_id, _HANDSHAKE.pack(header.handshake), *values]
    )
    return found


def _parse_head(head: memoryview) -> Message:
    try:
        tag, group_id, epoch, log_id, handshake, *values = msgpack.unpackb(head)
        kind, layout = _BY_TAG[tag]
        header = Header(
            GroupId(_text(group_id)), Epoch(_whole(epoch)), LogId(_text(log_id)), _HANDSHAKE.unpack(handshake)
        )
        found = [field.unpack(value) for field, value in zip(layout.values(), values, strict=True)]
        message: Message = kind(header, *found)
    except (ValueError, TypeError, KeyError, RecursionError) as error:  # msgpack's own errors are ValueErrors
        raise Invalid(f"replica message: {error}") from error
    return message


@dataclass(frozen=True, slots=True)
class Arrived:
    """A message; of a ``Frame`` also the log's bytes."""

    message: Message
    data: Buffer = b""


class Assembler:
    """Messages of one connection from its WebSocket messages. Memory: one unfinished frame, of what has come."""

    def __init__(self) -> None:
        self._frame: Frame | None = None
        self._pieces: list[memoryview] = []
        self._missing = 0
        self.log_bytes = 0  # of all frames so far

    def feed(self, payload: bytes) -> Arrived | None:
        """The message that this one completes; None: a frame goes on. *Errors*: Invalid: end the connection."""
        if len(payload) < _START.size:
            raise Invalid(f"replica message: expected {_START.size} bytes or more, found {len(payload)}")
        kind, _, version, size = _START.unpack_from(payload)
        if version != VERSION:
            raise Invalid(
                f"replica message: version {version} is not spoken here; this node speaks {VERSION}"
            )
        view = memoryview(payload)[_START.size :]
        if size > min(len(view), HEAD_BYTES_MAX):
            raise Invalid(f"replica message: a head of {size} bytes announced, {len(view)} there")
        if kind == _MORE and not size:
            return self._add(view)
        message = _parse_head(view[:size])
        if kind == _MESSAGE and type(message) is not Frame and size == len(view):
            return Arrived(message)
        if kind != _FRAME or type(message) is not Frame:
            raise Invalid(f"replica message: kind {kind} does not hold a {type(message).__name__}")
        return self._begin(message, view[size + -size % 8 :])

    def _begin(self, frame: Frame, data: memoryview) -> Arrived | None:
        """A frame begins; one that is unfinished was given up by its sender."""
        size = frame.end - frame.start
        if not 0 < size <= FRAME_BYTES_MAX:
            raise Invalid(f"replica message: a frame of {size} bytes; expected 1 to {FRAME_BYTES_MAX}")
        self._frame, self._pieces, self._missing = frame, [], size
        return self._add(data)

    def _add(self, data: memoryview) -> Arrived | None:
        if self._frame is None or len(data) > self._missing or not len(data):
            raise Invalid(f"replica message: {len(data)} bytes of a frame that lacks {self._missing}")
        self.log_bytes += len(data)
        self._pieces.append(data)
        self._missing -= len(data)
        if self._missing:
            return None
        whole = self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
        found = Arrived(self._frame, whole)
        self._frame, self._pieces = None, []
        return found

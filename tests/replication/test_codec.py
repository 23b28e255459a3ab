"""Replica messages as bytes: what was sent is what arrives, and nothing else does."""

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from firn.errors import Invalid
from firn.types import Epoch, Position
from firn_node.replication.doors import codec
from firn_node.replication.doors.codec import Arrived, Assembler, encode, frame_parts, more_parts
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
    Leave,
    Message,
    Refusal,
    Report,
    Welcome,
)
from firn_node.replication.record import GroupId, Incarnation, LogId, Member

HEADER = Header(GroupId("orders-0"), Epoch(3), LogId("a1"), Handshake(Incarnation("i1"), 4))
HISTORY = (EpochStart(Epoch(1), Position(4096)), EpochStart(Epoch(3), Position(9_000_000_000)))
MESSAGES: list[Message] = [
    Hello(HEADER, Member("node-0", "127.0.0.1:7700", 2), HISTORY, Position(1 << 62), Position(5), True),
    Hello(HEADER, Member("", "", 0), (), Position(0), Position(0), False),
    Welcome(HEADER, Position(77), Position(88), Epoch(2)),
    Welcome(HEADER, None, Position(88), Epoch(0)),
    Refusal(replace(HEADER, handshake=None), "a higher epoch is known: é"),
    Report(HEADER, Position(9), Position(8), False),
    Committed(HEADER, Position(9), Position(10)),
    Leave(HEADER, "damaged"),
    Ask(replace(HEADER, handshake=None), 17),
    Answer(HEADER, 17, Epoch(3), Position(99), True, False),
    Fence(HEADER, 18),
]
FRAME = Frame(HEADER, Position(4096), Position(4096 + 300), HISTORY[:1])


@pytest.mark.parametrize("message", MESSAGES, ids=lambda m: type(m).__name__)
def test_every_message_arrives_as_it_was_sent(message: Message) -> None:
    assert Assembler().feed(encode(message)) == Arrived(message)


def test_every_kind_of_message_has_bytes() -> None:
    assert {type(m) for m in MESSAGES} | {Frame} == set(Message.__args__)


def test_a_frame_arrives_whole_whatever_its_pieces_and_what_comes_between() -> None:
    data = random.Random(1).randbytes(300)
    for cut in (1, 7, 150, 299):
        assembler = Assembler()
        assert assembler.feed(b"".join(frame_parts(FRAME, data[:cut]))) is None
        assert assembler.feed(encode(MESSAGES[5])) == Arrived(MESSAGES[5])
        middle = (300 + cut) // 2
        if middle > cut:
            assert assembler.feed(b"".join(more_parts(data[cut:middle]))) is None
        found = assembler.feed(b"".join(more_parts(data[middle:])))
        assert found is not None
        assert (found.message, bytes(found.data)) == (FRAME, data)
    found = Assembler().feed(b"".join(frame_parts(FRAME, data)))
    assert found is not None
    assert bytes(found.data) == data


def test_a_frame_that_is_begun_anew_replaces_the_unfinished_one() -> None:
    assembler = Assembler()
    assert assembler.feed(b"".join(frame_parts(FRAME, bytes(100)))) is None
    assert assembler.feed(b"".join(frame_parts(FRAME, b"\1" * 200))) is None
    found = assembler.feed(b"".join(more_parts(b"\2" * 100)))
    assert found is not None
    assert bytes(found.data) == b"\1" * 200 + b"\2" * 100


@pytest.mark.parametrize(
    ("payload", "word"),
    [
        (b"", "8 bytes or more"),
        (b"\1\0\2\0\0\0\0\0", "version 2"),
        (b"\1\0\1\0\xff\xff\xff\x7f", "announced"),
        (b"\3\0\1\0\0\0\0\0", "of a frame that lacks 0"),
        (b"\3\0\1\0\0\0\0\0x", "of a frame that lacks 0"),
        (b"".join(frame_parts(FRAME, bytes(301))), "lacks 300"),
        (b"".join(frame_parts(FRAME, b"")), "lacks 300"),
        (b"".join(frame_parts(replace(FRAME, end=FRAME.start), b"")), "a frame of 0 bytes"),
        (b"".join(frame_parts(replace(FRAME, end=Position(1 << 40)), b"x")), "a frame of 1099511623680 bytes"),
        (b"\1" + frame_parts(FRAME, b"")[0][1:], "kind 1 does not hold a Frame"),
        (b"\2" + encode(MESSAGES[0])[1:], "kind 2 does not hold a Hello"),
        (b"\7" + encode(MESSAGES[0])[1:], "kind 7"),
        (encode(MESSAGES[0]) + b"x", "kind 1"),
    ],
)  # fmt: skip
def test_what_is_no_message_is_refused_with_the_reason(payload: bytes, word: str) -> None:
    with pytest.raises(Invalid, match=word):
        Assembler().feed(payload)


@pytest.mark.parametrize(
    "message",
    [
        Ask(HEADER, -1),
        Ask(HEADER, True),
        Ask(HEADER, 1 << 63),
        Report(HEADER, Position(1), Position(1), 1),
        Leave(HEADER, "x" * 5000),
        Hello(HEADER, Member("n", "a"), HISTORY[::-1], Position(1), Position(1), True),
        Ask(replace(HEADER, group_id=7), 1),
        Ask(replace(HEADER, epoch="3"), 1),
    ],
)
def test_a_field_of_another_type_or_range_is_refused(message: Message) -> None:
    with pytest.raises(Invalid, match="replica message"):
        Assembler().feed(encode(message))


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 4))
def test_damaged_messages_are_refused_or_mean_something_and_never_fail_otherwise(
    seed: int, flips: int
) -> None:
    rng = random.Random(seed)
    payload = bytearray(
        b"".join(frame_parts(FRAME, bytes(300))) if rng.random() < 0.2 else encode(rng.choice(MESSAGES))
    )
    for _ in range(flips):
        payload[rng.randrange(len(payload))] ^= 1 << rng.randrange(8)
    if rng.random() < 0.3:
        del payload[rng.randrange(len(payload)) :]
    try:
        found = Assembler().feed(bytes(payload))
    except Invalid:
        return
    assert found is None or isinstance(found.message, codec.Message)

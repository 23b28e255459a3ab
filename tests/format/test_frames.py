"""Frames of the stream: plain msgpack, whatever shortcut they were made or read by."""

from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from firn.errors import FirnError, Invalid
from firn.limits import FRAME_BYTES_MAX
from firn.wire import EMPTY_META, SMALL_BYTES_MAX, Assembler, Message, Op, frames, small_frame

SIZES = [0, 1, 200, 255, 256, 65_000, 65_400, 65_471, 65_472, 65_473, 65_537, 130_944, 130_945, 200_000]
IDS = [0, 1, 127, 128, 255, 256, 65_535, 65_536, (1 << 32) - 1, 1 << 32, (1 << 64) - 1]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("id", IDS)
def test_a_message_of_any_size_is_put_together_again(size: int, id: int) -> None:
    data, meta = bytes(range(256)) * (size // 256 + 1), {"if_offset": [None, 3]}
    sent = list(frames(Op.PRODUCE, id, meta, data[:size]))
    assembler, found = Assembler(bytes_max=1 << 20), None
    for number, frame in enumerate(sent):
        assert found is None
        assert len(frame) <= FRAME_BYTES_MAX
        op, frame_id, _, _ = msgpack.unpackb(frame)
        assert (op, frame_id) == (Op.MORE if number else Op.PRODUCE, id)
        found = assembler.feed(frame)
    assert found is not None
    assert (found.op, found.id, bytes(found.data)) == (Op.PRODUCE, id, data[:size])
    assert found.meta["if_offset"] == [None, 3]


@pytest.mark.parametrize("size", [0, 1, 255, 256, SMALL_BYTES_MAX])
@pytest.mark.parametrize("id", [*IDS, -1, -(1 << 63)])
def test_a_small_frame_says_what_the_frames_of_its_message_say(size: int, id: int) -> None:
    data, meta = bytes(range(256)) * 20, {"topic": "t", "keys": 1}
    (plain,) = frames(Op.GET, id, meta, data[:size])
    small = small_frame(Op.GET, id, msgpack.packb(meta), data[:size])
    assert msgpack.unpackb(small) == msgpack.unpackb(plain)
    assert Assembler(bytes_max=1).feed(small) == Message(Op.GET, id, meta, data[:size])
    assert msgpack.unpackb(small_frame(Op.ACK, id, EMPTY_META, data[:size])) == [Op.ACK, id, {}, data[:size]]


def outcome(frame: bytes) -> Any:
    """What becomes of a frame behind the first one of an unfinished message of 300 bytes."""
    assembler = Assembler(bytes_max=1 << 20)
    assembler.feed(msgpack.packb([Op.PRODUCE, 5, {"size": 300}, b""]))
    try:
        found = assembler.feed(frame)
    except FirnError as error:
        return type(error), error.message
    return (found.id, bytes(found.data)) if isinstance(found, Message) else found


def test_bytes_of_more_need_not_be_in_the_shape_that_this_package_gives_them() -> None:
    data = bytes(range(250)) + bytes(50)
    shapes = [
        msgpack.packb([Op.MORE, 5, {}, data]),
        b"\x94\x08\xcc\x05\x80\xc6\x00\x00\x01\x2c" + data,
        b"\x94\x08\x05\xde\x00\x00\xc5\x01\x2c" + data,
        b"\xdc\x00\x04\x08\x05\x80\xc5\x01\x2c" + data,
        msgpack.packb([Op.MORE, 5, {"any": 1}, data]),
    ]
    for shape in shapes:
        assert outcome(shape) == (5, data)


@pytest.mark.parametrize("left", range(1, 7))
def test_a_more_that_ends_before_its_size_is_not_taken_for_an_empty_one(left: int) -> None:
    found = outcome(msgpack.packb([Op.MORE, 5, {}, bytes(300)])[:left])
    assert isinstance(found, tuple)
    assert found[0] is Invalid


@pytest.mark.parametrize("data", [b"", b"x"])
def test_a_size_that_is_true_ends_no_stream(data: bytes) -> None:
    with pytest.raises(Invalid, match="size True"):
        Assembler(bytes_max=1 << 20).feed(msgpack.packb([Op.PRODUCE, 5, {"size": True}, data]))


@given(st.data())
@settings(max_examples=200)
def test_a_frame_that_is_cut_or_lengthened_is_refused(data: st.DataObject) -> None:
    whole = msgpack.packb([Op.MORE, data.draw(st.sampled_from(IDS)), {}, bytes(300)])
    cut = data.draw(st.integers(1, len(whole) - 1))
    changed = data.draw(st.sampled_from([whole[:-cut], whole + bytes(cut)]))
    found = outcome(changed)
    assert isinstance(found, tuple)
    assert found[0] is Invalid
    assert "not msgpack" in found[1]

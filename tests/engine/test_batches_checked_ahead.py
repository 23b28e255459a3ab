"""A first touch has the batches behind it checked meanwhile: who looks keys up one by one waits for less of it."""

import os
import threading
import weakref
from pathlib import Path

import numpy as np
import pytest

from firn.errors import Corrupt
from firn_node.compaction.ahead import AHEAD, BATCHES, BLOCKS, WAITING_MAX, Ahead
from firn_node.compaction.keyindex import BLOCK_BYTES, BLOCK_ROWS
from firn_node.disk import Mode, RealDisk, RealFile
from firn_node.engine.broker import Broker
from support.compaction_kit import Partition, fingerprint_of
from support.engine_kit import Kit, run, settings

PATIENCE_S = 60.0
KEYS = 40
BATCH_BYTES = 5000 * KEYS
COUNT = BATCHES + 3


class _CountedFile(RealFile):
    """Notes by which thread whole batches, or whole blocks, were read."""

    reads: list[str]
    counted_bytes: int
    has_descriptor: bool

    def pread(self, size: int, position: int) -> bytes:
        if size >= self.counted_bytes:
            self.reads.append(threading.current_thread().name)
        return super().pread(size, position)

    def fileno(self) -> int | None:
        return super().fileno() if self.has_descriptor else None


class _CountedDisk(RealDisk):
    def __init__(self, root: Path, *, has_descriptors: bool = True, counted_bytes: int = BATCH_BYTES) -> None:
        super().__init__(root)
        self._counted_bytes = counted_bytes
        self.reads: list[str] = []
        self._has_descriptors = has_descriptors

    def open(self, path: str, mode: Mode = "read") -> RealFile:
        plain = super().open(path, mode)
        file = _CountedFile(path, os.dup(plain.fileno() or 0))
        plain.close()
        file.reads, file.counted_bytes = self.reads, self._counted_bytes
        file.has_descriptor = self._has_descriptors
        return file


def value(batch: int) -> bytes:
    return b"value %d." % batch + b"x" * 5000


async def filled(disk: _CountedDisk, folder: Path, *, is_compacted: bool) -> Kit:
    kit = Kit(Broker(settings(folder), disk=disk))
    await kit.broker.start()
    await kit.create("t", compaction={"deleteRetention": "0s"})
    for batch in range(COUNT):
        await kit.put("t", [(b"%d-%d" % (batch, n), value(batch)) for n in range(KEYS)])
    await kit.broker.checkpoint()
    if is_compacted:
        await kit.compact("t")
    disk.reads.clear()
    return kit


@pytest.mark.parametrize("is_compacted", [False, True])
def test_batches_behind_one_that_was_touched_are_read_once_and_not_by_who_asks(
    tmp_path: Path, is_compacted: bool
) -> None:
    async def main() -> None:
        disk = _CountedDisk(tmp_path)
        kit = await filled(disk, tmp_path, is_compacted=is_compacted)
        assert await kit.get("t", b"0-1") == value(0)
        AHEAD.settle(drops=False)
        assert len(disk.reads) == 1 + BATCHES
        assert set(disk.reads[1:]) == {"firn-ahead"}
        for batch in range(1 + BATCHES):
            assert await kit.get("t", b"%d-2" % batch) == value(batch)
        assert len(disk.reads) == 1 + BATCHES
        assert await kit.get("t", b"%d-1" % (COUNT - 1)) == value(COUNT - 1)
        assert len(disk.reads) == 2 + BATCHES
        await kit.broker.stop()

    run(main())


@pytest.mark.parametrize("is_compacted", [False, True])
def test_damage_that_was_met_ahead_is_told_to_who_asks_for_the_batch(
    tmp_path: Path, is_compacted: bool
) -> None:
    async def main() -> None:
        kit = await filled(_CountedDisk(tmp_path), tmp_path, is_compacted=is_compacted)
        for file in tmp_path.rglob("*"):
            if file.is_file() and (at := file.read_bytes().find(value(1))) >= 0:
                with file.open("r+b") as opened:
                    opened.seek(at)
                    opened.write(b"V")
        assert await kit.get("t", b"0-1") == value(0)
        AHEAD.settle(drops=False)
        with pytest.raises(Corrupt):
            await kit.broker.get("t", [b"1-1"])
        assert await kit.get("t", b"2-1") == value(2)
        await kit.broker.stop()

    run(main())


@pytest.mark.parametrize("is_compacted", [False, True])
def test_nothing_is_read_ahead_where_nobody_can_say_what_is_in_memory(
    tmp_path: Path, is_compacted: bool
) -> None:
    async def main() -> None:
        disk = _CountedDisk(tmp_path, has_descriptors=False)
        kit = await filled(disk, tmp_path, is_compacted=is_compacted)
        assert await kit.get("t", b"0-1") == value(0)
        AHEAD.settle(drops=False)
        assert len(disk.reads) == 1
        await kit.broker.stop()

    run(main())


@pytest.mark.parametrize("has_descriptors", [True, False])
def test_blocks_of_a_key_index_behind_one_that_was_touched_are_checked_ahead(
    tmp_path: Path, has_descriptors: bool
) -> None:
    disk = _CountedDisk(tmp_path, has_descriptors=has_descriptors, counted_bytes=BLOCK_BYTES)
    partition = Partition(str(tmp_path), disk=disk)
    keys = [b"%06d" % n for n in range((BLOCKS + 3) * BLOCK_ROWS)]
    partition.append(keys, [b"v"] * len(keys))
    partition.seal()
    hi, lo = fingerprint_of(keys)
    in_order = np.argsort(hi)

    def offsets(block: int) -> list[int]:
        at = int(in_order[block * BLOCK_ROWS + BLOCK_ROWS // 2])
        assert list(partition.compacted.dirty_newest(int(hi[at]), int(lo[at]))) == [at]
        AHEAD.settle(drops=False)
        return [disk.reads.count("MainThread"), disk.reads.count("firn-ahead")]

    disk.reads.clear()
    ahead = BLOCKS if has_descriptors else 0
    assert offsets(0) == [1, ahead]
    assert offsets(BLOCKS) == [1 if ahead else 2, ahead]
    assert offsets(BLOCKS + 2) == [2 if ahead else 3, ahead]


def test_checks_beyond_the_limit_are_not_made_and_what_waits_can_be_dropped() -> None:
    ahead, gate, begun = Ahead(), threading.Event(), threading.Event()
    made: list[int] = []

    def held() -> None:
        begun.set()
        assert gate.wait(PATIENCE_S)

    ahead.ask(held)
    assert begun.wait(PATIENCE_S)
    for number in range(WAITING_MAX + 5):
        ahead.ask(lambda number=number: made.append(number))  # type: ignore[misc]
    gate.set()
    ahead.settle(drops=False)
    assert made == list(range(WAITING_MAX))
    gate.clear()
    begun.clear()
    ahead.ask(held)
    assert begun.wait(PATIENCE_S)

    def dropped() -> None:
        made.append(-1)

    weakref.finalize(dropped, gate.set)  # nobody knows of it any more: what was waiting is let go of
    ahead.ask(dropped)
    del dropped
    ahead.settle(drops=True)
    assert -1 not in made


def test_a_check_that_fails_does_not_keep_the_next_one_from_being_made() -> None:
    ahead, made = Ahead(), []

    def failing() -> None:
        raise Corrupt("damaged")

    ahead.ask(failing)
    ahead.ask(lambda: made.append(1))
    ahead.settle(drops=False)
    assert made == [1]


def test_without_room_for_a_thread_nothing_is_checked_ahead_and_nobody_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no_room(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    ahead, made = Ahead(), []
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", no_room)
        ahead.ask(lambda: made.append(1))
    ahead.settle(drops=False)
    ahead.ask(lambda: made.append(2))
    ahead.settle(drops=False)
    assert made == [2]

"""The epoch-start record: its bytes, and that everything but the epoch history passes over it.

``python tests/replication/test_epoch_start.py NEW`` writes the golden file if it is missing.
"""

import re
import sys
from pathlib import Path

from engine_kit import NOW, run, running

from firn.batch import Batch, Flag, parse_header
from firn.types import Epoch
from firn_node.disk import RealDisk
from firn_node.filecache import FileCache
from firn_node.kernels import Fault, inspect_group, secret_of
from firn_node.log import CommitLog
from firn_node.offline.audit import audit_folder
from firn_node.replication.epochstart import KEY, epoch_start_batch
from firn_node.replication.record import GroupId, LogId

GOLDEN = Path(__file__).parents[1] / "format" / "golden" / "epoch-start.bin"
DOCUMENT = Path(__file__).parents[2] / "docs" / "formats-log.md"


def start_of(epoch: int, now_ms: int = NOW) -> bytes:
    return epoch_start_batch(
        Epoch(epoch), group_id=GroupId("orders-0"), log_id=LogId("5ae8d7b1c0f3a942"), now_ms=now_ms
    )


def test_the_bytes_of_the_epoch_start_record_stay_as_they_are() -> None:
    assert start_of(7, 1_357_034_400_000) == GOLDEN.read_bytes()


def test_the_document_shows_the_header_of_the_golden_file() -> None:
    dump = re.search(r"<!-- epoch-start -->\n```\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    assert dump is not None
    rows = [line.split("  ")[1] for line in dump[1].splitlines()]
    assert bytes.fromhex(" ".join(rows)) == GOLDEN.read_bytes()[:104]


def test_an_epoch_start_is_a_sound_control_batch_of_its_epoch() -> None:
    data = start_of(7)
    header = parse_header(data)
    assert (header.epoch, header.size, header.topic_id) == (7, len(data), 0)
    assert header.flags & Flag.CONTROL
    assert Batch(memoryview(data), header).key_list() == [KEY]
    group = inspect_group(data, secret_of(bytes(16)), is_produce=False)
    assert group.fault.tolist() == [Fault.OK]


def _append(folder: Path, *epochs: int) -> None:
    """What a group's members leave in the log of a folder."""
    disk = RealDisk(folder)
    cache = FileCache(disk, 4)
    log = CommitLog.open(disk, cache, f"{folder}/log", segment_bytes=1 << 20, verify_from=0)
    log.append([start_of(epoch) for epoch in epochs])
    log.close()
    cache.close()


def test_dispatch_and_verify_pass_over_epoch_starts(tmp_path: Path) -> None:
    async def story() -> None:
        async with running(tmp_path) as kit:
            await kit.create()
            await kit.put("t", [(b"a", b"1")])
        _append(tmp_path, 2)
        async with running(tmp_path) as kit:
            await kit.put("t", [(b"b", b"2")])
        _append(tmp_path, 3, 4)
        async with running(tmp_path) as kit:
            assert await kit.map("t") == {b"a": b"1", b"b": b"2"}
            assert kit.broker.core.dispatched_position == kit.broker.core.log.written_end

    run(story())
    found = audit_folder(str(tmp_path))
    assert found.damages == []
    assert found.batches >= 6


if __name__ == "__main__" and sys.argv[1:] == ["NEW"] and not GOLDEN.exists():
    GOLDEN.write_bytes(start_of(7, 1_357_034_400_000))

"""The log's formats: golden files pin their bytes, damage to any byte is seen.

A golden file is only ever added. ``python tests/log/test_log_formats.py NEW`` writes the ones that are missing;
an existing one is never written again.
"""

import contextlib
import re
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from firn_sim.batches import batch
from firn_sim.disk import SimDisk
from hypothesis import given, settings
from hypothesis import strategies as st

from firn.errors import Corrupt
from firn_node.filecache import FileCache
from firn_node.kernels import secret_of
from firn_node.log.commitlog import CommitLog
from firn_node.log.headpage import HEAD_BYTES, HeadPage, Slot, first_page, parse_page
from firn_node.log.keyquery import KeyQueryIndex
from firn_node.log.keysfile import PAGE_BYTES, KeysHeader, encode_pages, positions_of, read_header
from firn_node.log.segment import encode_summary, keys_path, parse_summary, segment_path, summary_path
from firn_node.log.walk import TopicBytes

GOLDEN = Path(__file__).parents[1] / "format" / "golden"
DOCUMENT = Path(__file__).parents[2] / "docs" / "formats-log.md"
FOLDER = "/log"


def _small_log() -> SimDisk:
    """A log of two segments, closed cleanly, with a keys file for the sealed one."""
    disk = SimDisk(0)
    log = CommitLog.open(disk, FileCache(disk, 4), FOLDER, segment_bytes=1024, verify_from=0)
    log.append([batch([b"N14228", b"N24211"], topic_id=4096, timestamp=1_357_034_400_000, append_ms=5_000)])
    log.sync()
    log.append([batch([b"N14228", b""], topic_id=8192, timestamp=1_357_034_500_000, append_ms=6_000)])
    log.append([batch([b"N619AA"], topic_id=4096, value=bytes(600), append_ms=7_000)])
    log.sync()
    KeyQueryIndex(log, disk, FileCache(disk, 4), FOLDER, secret_of(bytes(range(16)))).build_missing()
    log.close()
    return disk


def _head_page() -> bytes:
    return _small_log().content(segment_path(FOLDER, 0))[:HEAD_BYTES]


def _marked_head_page() -> bytes:
    disk = _small_log()
    last = max(int(n[:20]) for n in disk.list(FOLDER))
    return disk.content(segment_path(FOLDER, last))[:HEAD_BYTES]


GOLDENS: dict[str, Callable[[], bytes]] = {
    "log-head-page.bin": _head_page,
    "log-head-page-clean-stop.bin": _marked_head_page,
    "log-summary.bin": lambda: _small_log().content(summary_path(FOLDER, 0)),
    "log-keys.bin": lambda: _small_log().content(keys_path(FOLDER, 0)),
}


@pytest.mark.parametrize("name", GOLDENS)
def test_the_bytes_of_the_log_formats_stay_as_they_are(name: str) -> None:
    assert GOLDENS[name]() == (GOLDEN / name).read_bytes()


def test_golden_files_read_as_what_was_written() -> None:
    head = parse_page((GOLDEN / "log-head-page.bin").read_bytes(), 0)
    assert head.newest == Slot(3, 0, 0, 200, 392, 6_000)
    marked = parse_page((GOLDEN / "log-head-page-clean-stop.bin").read_bytes(), 392)
    assert marked.newest is not None
    assert marked.newest.is_marker
    assert not head.is_damaged
    topics = parse_summary((GOLDEN / "log-summary.bin").read_bytes(), start=0, end=392)
    assert topics == {4096: TopicBytes(200, 5_000), 8192: TopicBytes(192, 6_000)}


def test_the_worked_example_of_the_document_is_the_golden_slot() -> None:
    text = DOCUMENT.read_text()
    dump = re.search(r"<!-- slot -->\n```\n(.*?)```", text, re.DOTALL)
    assert dump is not None
    rows = [line.split("  ")[1] for line in dump[1].splitlines()]
    slot = Slot(3, 0, 0, 200, 392, 6_000)
    assert bytes.fromhex(" ".join(rows)) == slot.encode()
    assert (GOLDEN / "log-head-page.bin").read_bytes()[slot.offset :][:64] == slot.encode()


def test_damage_to_any_byte_of_a_slot_is_seen() -> None:
    slot = Slot(2, 64, 8, 128, 256, 9)
    page = first_page(slot)
    assert parse_page(page, 64).newest == slot
    for at in range(64):
        broken = bytearray(page)
        broken[at] ^= 1
        assert parse_page(bytes(broken), 64) == HeadPage(None, True)
    assert parse_page(page, 72).newest is None  # another segment's page
    assert parse_page(page[:30], 64).newest is None
    assert not parse_page(b"", 64).is_damaged


def test_damage_to_any_byte_of_a_summary_is_seen() -> None:
    topics = {8: TopicBytes(100, 5), 1 << 63: TopicBytes(7, -1)}
    data = encode_summary(16, 32, topics)
    assert parse_summary(data, start=16, end=32) == topics
    for at in range(len(data)):
        broken = bytearray(data)
        broken[at] ^= 0x40
        assert parse_summary(bytes(broken), start=16, end=32) is None
        assert parse_summary(data[:at], start=16, end=32) is None
    assert parse_summary(data, start=16, end=40) is None


def _keys_file(hi: list[int]) -> tuple[SimDisk, KeysHeader, np.ndarray, np.ndarray]:
    words = np.sort(np.array(hi, np.uint64))
    positions = np.arange(len(words), dtype=np.uint64) * np.uint64(8)
    header = KeysHeader(
        start=0, end=8 * len(hi), pairs=len(hi), probe=1, min_timestamp=2, max_timestamp=3, min_append=4,
        max_append=5,
    )  # fmt: skip
    disk = SimDisk(0)
    disk.put("/keys", b"".join([header.encode(), *encode_pages(words, positions)]))
    return disk, header, words, positions


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 2**32),
    st.integers(1, 3_000),
    st.sampled_from((4, 200, 2**64)),
)
def test_a_search_finds_exactly_the_pairs_of_a_fingerprint(seed: int, count: int, distinct: int) -> None:
    """Few distinct ones: runs of a hot key over many pages."""
    rng = np.random.default_rng(seed)
    choice = rng.integers(0, 2**64, min(distinct, count), np.uint64, endpoint=False)
    disk, header, words, positions = _keys_file(rng.choice(choice, count).tolist())
    file = disk.open("/keys")
    assert read_header(file) == header
    for target in [*rng.choice(choice, 5).tolist(), 0, 2**64 - 1, *rng.integers(0, 2**63, 3).tolist()]:
        wanted = positions[words == np.uint64(target)].tolist()
        assert positions_of(file, header, target) == wanted


def test_a_search_in_many_pages_reads_few_of_them() -> None:
    rng = np.random.default_rng(1)
    disk, header, words, _ = _keys_file(rng.integers(0, 2**64, 100_000, np.uint64).tolist())
    reads: list[str] = []
    disk.delay = lambda kind, path: reads.append(kind)
    file = disk.open("/keys")
    for target in words[::997].tolist():
        reads.clear()
        assert len(positions_of(file, header, target)) == 1
        assert len(reads) <= 14


def test_damage_to_any_page_of_a_keys_file_is_seen_where_it_is_read() -> None:
    for at in (0, 5, 24, 40, 79, PAGE_BYTES, PAGE_BYTES + 4084, PAGE_BYTES + 4095, 2 * PAGE_BYTES + 4080):
        disk, header, words, _ = _keys_file(list(range(1, 300)))
        disk.flip("/keys", at)
        file = disk.open("/keys")
        with pytest.raises(Corrupt, match=r"/keys at byte .*expected"):
            positions_of(file, read_header(file), int(words[0] if at < 2 * PAGE_BYTES else words[-1]))
        assert header.pages == 2


def _write_missing() -> None:
    for name, make in GOLDENS.items():
        with contextlib.suppress(FileExistsError), (GOLDEN / name).open("xb") as file:
            file.write(make())


if __name__ == "__main__" and sys.argv[1:] == ["NEW"]:
    _write_missing()

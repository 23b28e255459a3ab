"""One thread writes, others read."""

import threading
from pathlib import Path

import pytest

from firn_node.disk import RealDisk
from firn_node.index import NewEntry, open_index


@pytest.mark.parametrize("kind", ["rocksdb", "files"])
def test_readers_see_whole_prefixes_while_a_writer_appends_flushes_and_trims(
    kind: str, tmp_path: Path
) -> None:
    index = open_index(kind, str(tmp_path / "index"), RealDisk(tmp_path), memory_bytes=1 << 20)
    published = [0]
    failures: list[str] = []
    is_done = threading.Event()

    def read() -> None:
        while not is_done.is_set():
            end = published[0]
            if end == 0:
                continue
            start = index.log_start // 8 * 10
            newest = index.find(8, 0, end - 1)
            entries = index.scan(8, 0, start, limit=50)
            bases = [e.base_offset for e in entries]
            if newest is None or newest.end_offset != end or not bases:
                # Right only for a reader that stood still until all that it had known was trimmed.
                if index.log_start <= (end // 10 - 1) * 8:
                    failures.append(f"end {end}, log start {index.log_start}: found {newest}, {bases}")
            elif bases != list(range(bases[0], bases[0] + 10 * len(bases), 10)) or bases[0] < start:
                failures.append(f"from {start}: {bases}")

    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    for n in range(400):
        index.append([NewEntry(8, p, n * 10, n * 10 + 10, n * 8, 8, 0, n) for p in range(3)])
        published[0] = n * 10 + 10
        if n % 40 == 39:
            index.flush(n * 8 + 8)
            index.trim(n * 4)
    is_done.set()
    for reader in readers:
        reader.join()
    index.close()
    assert failures == []

"""A simulated replica's log kept in the broker's own ``CommitLog`` above ``SimDisk``.

Every entry is a whole batch: the epoch is its header's, the ident its producer_id. Recovery, truncation, segments and
head pages are the broker's; power losses are ``SimDisk``'s: torn sectors, half-written batches, lost names. Whatever
recovery keeps must be what was appended, and at least what was synced.
"""

import random
from collections.abc import Sequence

from firn_sim.disk import SimDisk
from firn_sim.replicalog import EPOCH_START, Entry, ReplicaLog, record_of

from firn.batch import HEADER_BYTES, Identity, columns_of, encode, iterate, parse_header
from firn_node.filecache import FileCache
from firn_node.log import CommitLog

FOLDER = "/log"
SEGMENT_BYTES = 1 << 14


def entry_batch(entry: Entry) -> bytes:
    """The batch of an entry: the same bytes on every replica."""
    identity = Identity(
        topic_id=8, partition=0, epoch=entry.epoch, producer_id=entry.ident, append_timestamp=1_000
    )
    key, value = record_of(entry.ident)
    return encode(columns_of([key], [value], 1_000), identity)


_SIZES = {
    ident % 5 == 0: len(entry_batch(Entry(1, ident))) for ident in (1, 5)
}  # without a value, and with one


class FirnLog(ReplicaLog):
    entry_size = _SIZES[False]

    def size_of(self, ident: int) -> int:
        return _SIZES[ident % 5 == 0]

    def __init__(self, start: int = 0, chain: int = 0) -> None:
        super().__init__(start, chain)
        self._disk = SimDisk(start)
        self._disk.make_folder(FOLDER)
        self._log = self._open()

    def _open(self) -> CommitLog:
        cache = FileCache(self._disk, 16)
        return CommitLog.open(
            self._disk, cache, FOLDER, segment_bytes=SEGMENT_BYTES, verify_from=0, create_at=self.base
        )

    def append(self, entries: Sequence[Entry]) -> int:
        self._log.append([entry_batch(entry) for entry in entries])
        end = super().append(entries)
        assert self._log.written_end == end, "every entry is as long as it says"
        return end

    def synced(self, end: int, cuts: int) -> None:
        self._log.sync()
        super().synced(end, cuts)
        assert self._log.durable_end >= self.durable, "a sync covers what was written before it"

    def cut(self, end: int) -> None:
        self._log.truncate(end)
        super().cut(end)

    def kill(self) -> None:
        self._disk.kill()

    def lose_power(self, rng: random.Random) -> None:
        self._disk.random.seed(rng.getrandbits(64))
        self._disk.crash()

    def recover(self) -> None:
        """What the log has kept, compared with what was appended."""
        self._disk.kill()
        self._log = self._open()
        end = self._log.written_end
        assert self.durable <= end <= self.written, (
            f"recovered {end}, durable {self.durable}, {self.written} written"
        )
        self._drop_after(end)
        super().recover()
        found, kept = self.between(self._log.start, end), super().between(self._log.start, end)
        assert found == kept, "recovery keeps what was appended"

    def release(self, before: int) -> None:
        super().release(self._log.release(min(before, self.durable)))

    def between(self, start: int, end: int) -> list[Entry]:
        """The entries as their headers say, read from the log's files."""
        entries = []
        for _, data in self._log.scan(start, end):
            at = 0
            while len(data) - at >= HEADER_BYTES:
                header = parse_header(data, at)
                entries.append(Entry(header.epoch, header.producer_id, header.size))
                at += header.size
        return entries

    def records(self, start: int, end: int) -> list[tuple[bytes, bytes | None]]:
        """Keys and values as the stored batches have them, read from the log's files."""
        found: list[tuple[bytes, bytes | None]] = []
        for _, data in self._log.scan(start, end):
            for batch in iterate(data):
                batch.verify()
                if batch.header.producer_id != EPOCH_START:
                    found += zip(batch.key_list(), batch.value_list(), strict=True)
        return found

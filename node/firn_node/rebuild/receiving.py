"""One segment of a compacted log as it arrives: checked, hashed with the own secret, written.

The master's batches are kept byte for byte; row numbers stay, so its masks fit. Batch index and key index are made
here: fingerprints are keyed by a secret that no data folder sends anywhere.
"""

import numpy as np

from firn.batch import HEADER_BYTES
from firn.errors import Corrupt
from firn_node.compaction.manifest import CleanSegment, Manifest
from firn_node.compaction.segment import SegmentWriter
from firn_node.disk import Disk
from firn_node.kernels import Fault, inspect_group
from firn_node.kernels.group import fault_error
from firn_node.log.walk import announced_size, headers
from firn_node.rebuild.keyruns import U64, KeyRuns


class Receiver:
    """``at``: bytes taken so far, which is where the sender goes on. ``close`` it at the end, however that comes about."""

    def __init__(
        self, disk: Disk, folder: str, manifest: Manifest, segment: CleanSegment, secret: U64
    ) -> None:
        self._identity = (manifest.topic_id, manifest.partition)
        self._segment = segment
        self._secret = secret
        self._path = f"{folder}/{segment.name}"
        disk.unlink(self._path)
        self._writer = SegmentWriter(
            disk, self._path, topic_id=manifest.topic_id, partition=manifest.partition
        )
        self._keys = KeyRuns(disk, f"{self._path}.rows")
        self.at = 0

    @property
    def left(self) -> int:
        return self._segment.bytes - self.at

    def take(self, data: memoryview) -> int:
        """Take the whole batches that ``data`` begins with; how many bytes that were.

        *Errors*: Corrupt: what came is not what the master has, or that is damaged; nothing of it was taken.
        """
        end = headers(data).end
        if not end:
            self._check_begun(data)
            return 0
        whole = data[:end]
        group = inspect_group(whole, self._secret, is_produce=False)
        faults = np.flatnonzero(group.fault != Fault.OK)
        if len(faults):
            raise self._fault(fault_error(group, int(faults[0])).message)
        heads, last = group.heads(), self._writer.end - 1
        for head in heads:
            if (head.topic_id, head.partition) != self._identity:
                raise self._fault(f"a batch of topic {head.topic_id} partition {head.partition}")
            if head.base_offset <= last:
                raise self._fault(f"offset {head.base_offset} behind offset {last}")
            last = head.last_offset
        rows = np.arange(self._writer.rows, self._writer.rows + len(group.hi), dtype=np.uint64)
        word: U64 = (group.lo.astype(np.uint64) << np.uint64(32)) + (rows << np.uint64(1)) + group.tombstone
        for head in heads:
            self._writer.add_batch(
                whole[head.start : head.start + head.size], rows=head.records, first=head.base_offset,
                last=head.last_offset, keys_bytes=head.keys_bytes, max_timestamp=head.max_timestamp,
            )  # fmt: skip
        self._keys.add(group.hi, word)
        self.at += end
        return end

    def finish(self) -> None:
        """*Effects*: durable on return, but for the file's name. *Errors*: Corrupt: not what the manifest says."""
        writer, segment = self._writer, self._segment
        for hi, word in self._keys.portions():
            writer.add_keys(hi, word)
        footer = writer.finish(start=segment.start, end=segment.end)
        found = (footer.rows, footer.batches, footer.batches_bytes, footer.tombstones)
        expected = (segment.rows, segment.batches, segment.bytes, segment.tombstones)
        if found != expected or not segment.start <= writer.start < writer.end <= segment.end:
            raise Corrupt(
                f"{self._path}: expected (rows, batches, bytes, tombstones) {expected}, found {found}",
                file=self._path, position=0, expected=str(expected), found=str(found),
            )  # fmt: skip

    def close(self) -> None:
        self._keys.close()

    def _check_begun(self, data: memoryview) -> None:
        """What does not begin with a whole batch begins with a part of one."""
        size = announced_size(bytes(data[:HEADER_BYTES]))
        if len(data) >= HEADER_BYTES and (size is None or size <= len(data) or size > self.left):
            raise self._fault("no batch")

    def _fault(self, what: str) -> Corrupt:
        return Corrupt(
            f"{self._path} at byte {self.at}, as it arrived: {what}", file=self._path, position=self.at
        )

"""Pulling, within one thread: a partition's pinned generation, piece by piece, into its folder.

A partition is whole once its MANIFEST is there, and then stays, whatever becomes of the master. Pieces are asked for
from where the last whole one ended, as long as the pin lives; a pin that is gone starts the partition over.

Steps: 1. an empty folder, 2. a pin, 3. each segment, synced, 4. masks, synced, 5. the folder is synced, 6. MANIFEST.
"""

import http.client
from contextlib import closing
from dataclasses import replace
from threading import Lock

from firn.errors import Corrupt
from firn_node.compaction import manifest as manifests
from firn_node.compaction import mask as masks
from firn_node.compaction.manifest import CleanSegment, Manifest
from firn_node.disk import Disk, replace_file
from firn_node.failpoints import step
from firn_node.rebuild.keyruns import U64
from firn_node.rebuild.receiving import Receiver
from firn_node.rebuild.remote import Pinned, Remote

REQUEST_BYTES = 64 << 20  # more than any batch
PIECE_BYTES = 1 << 20  # checked, hashed and written at once; or one larger batch
TRIES = 3  # of one piece, before everything about the connection is found out anew

LOST = (OSError, http.client.HTTPException)


class Progress:
    """What has come, for people; counted from several threads."""

    def __init__(self) -> None:
        self._lock = Lock()
        self.phase = "waiting"
        self.partitions = 0
        self.partitions_done = 0
        self.bytes = 0
        self.bytes_expected = 0
        self.upto = 0  # the log has to be dispatched so far
        self.reason: str | None = None

    @property
    def moved(self) -> tuple[int, int]:
        return self.bytes, self.partitions_done

    def got(self, size: int) -> None:
        with self._lock:
            self.bytes += size

    def done(self) -> None:
        with self._lock:
            self.partitions_done += 1

    def needs(self, position: int) -> None:
        with self._lock:
            self.upto = max(self.upto, position)


class Puller:
    """Pulls partitions for a log that begins at ``start``."""

    def __init__(self, disk: Disk, folder: str, *, start: int, secret: U64, progress: Progress) -> None:
        self._disk = disk
        self._folder = folder
        self._start = start
        self._secret = secret
        self._progress = progress

    def pull(self, remote: Remote, topic_id: int, number: int) -> None:
        """*Effects*: whole and durable on return, but for the names of the folders above.

        *Errors*: SnapshotExpired, Corrupt, LOST: pull it again; UnknownTopic: it is deleted.
        """
        folder = f"{self._folder}/{topic_id}/{number}"
        if not self._disk.exists(f"{folder}/{manifests.FILE_NAME}"):
            self._disk.remove_tree(folder)
            pinned = remote.pin(topic_id, number, self._start)
            try:
                self._pull(remote, pinned, folder)
            finally:
                remote.release(pinned.id)
            self._progress.needs(pinned.position)
        self._progress.done()

    def _pull(self, remote: Remote, pinned: Pinned, folder: str) -> None:
        disk, manifest = self._disk, pinned.manifest
        disk.make_folder(folder)
        for number, segment in enumerate(manifest.segments):
            self._pull_segment(remote, pinned, number, folder)
            if segment.mask is not None:
                self._pull_mask(remote, pinned, number, f"{folder}/{segment.mask}")
            step("rebuild.segment_pulled")
        disk.sync_folder(folder)
        step("rebuild.partition_pulled")
        replace_file(disk, f"{folder}/{manifests.FILE_NAME}", as_pulled(manifest).encode())

    def _pull_segment(self, remote: Remote, pinned: Pinned, number: int, folder: str) -> None:
        manifest = pinned.manifest
        with closing(
            Receiver(self._disk, folder, manifest, manifest.segments[number], self._secret)
        ) as receiver:
            failures = 0
            while receiver.left:
                at = receiver.at
                try:
                    self._pull_range(remote, pinned.id, number, receiver)
                except LOST:
                    failures = failures + 1 if receiver.at == at else 0
                    if failures >= TRIES:
                        raise
                    remote.hang_up()
            receiver.finish()

    def _pull_range(self, remote: Remote, pin: str, number: int, receiver: Receiver) -> None:
        """Ask for the next bytes and take all whole batches of them. *Errors*: Corrupt; LOST."""
        at, left = receiver.at, min(REQUEST_BYTES, receiver.left)
        is_last = left == receiver.left
        body = remote.batches(pin, number, at, left)
        view, filled = memoryview(bytearray(2 * PIECE_BYTES)), 0
        while left:
            if filled == len(view):  # one batch that is larger than all before
                larger = memoryview(bytearray(2 * len(view)))
                larger[:filled] = view
                view = larger
            count = body.readinto(view[filled : filled + left])
            if not count:
                raise ConnectionResetError("the bytes of a segment ended early")
            filled, left = filled + count, left - count
            if filled < PIECE_BYTES and left:
                continue
            taken = receiver.take(view[:filled])
            self._progress.got(taken)
            filled -= taken
            view[:filled] = view[taken : taken + filled]
        if receiver.at == at or (filled and is_last):
            raise Corrupt(f"segment {number}: no whole batch at byte {receiver.at}, as it arrived")

    def _pull_mask(self, remote: Remote, pinned: Pinned, number: int, path: str) -> None:
        """*Errors*: Corrupt: not the mask of this segment."""
        segment = pinned.manifest.segments[number]
        data = remote.mask(pinned.id, number)
        masks.decode(data, file=path, rows=segment.rows, masked=segment.masked)
        replace_file(self._disk, path, data)


def as_pulled(manifest: Manifest) -> Manifest:
    """The manifest of the pulled files: no dirty key indexes, which are made here; key indexes within their segments."""
    segments = tuple(_as_pulled(segment) for segment in manifest.segments)
    return replace(manifest, segments=segments, dirty=())


def _as_pulled(segment: CleanSegment) -> CleanSegment:
    return replace(segment, keys=None)

"""The epoch history of a log: ``DIR/epochs`` up to a position, the batch headers from there on.

A u32 CRC-32C, little-endian, of all that follows, then a msgpack map ``{version: 1, upto, epochs: [[epoch, start],
...]}``, ascending: the epochs that began before position ``upto``, also those whose batches retention has removed.

Invariants: the log was durable up to ``upto``; the file is cut before the log is, so that it never tells of bytes
that were replaced. It is derived: without it all headers that are left are read, and what retention removed is
forgotten, which costs a rebuild at worst (no epoch in common).
"""

import logging

import msgpack

from firn.crc import crc32c
from firn.errors import Corrupt
from firn.types import Epoch, Position
from firn_node.disk import Disk, read_file, replace_file
from firn_node.log import CommitLog
from firn_node.log.epochs import epoch_starts
from firn_node.replication.messages import EpochStart, History

VERSION = 1
NAME = "epochs"
KEPT = (
    4096  # epochs: older ones are forgotten at the next start, so that a history always fits into a message
)

log = logging.getLogger("firn.replication")


def encode(history: History, upto: Position) -> bytes:
    kept = [[entry.epoch, entry.start] for entry in history if entry.start < upto]
    body: bytes = msgpack.packb({"version": VERSION, "upto": upto, "epochs": kept})
    return crc32c(body).to_bytes(4, "little") + body


def parse(data: bytes) -> tuple[History, Position] | None:
    """The history and where it ends; None for a damaged file, or another version's."""
    body = data[4:]
    if int.from_bytes(data[:4], "little") != crc32c(body):
        return None
    document = msgpack.unpackb(body)
    if document.get("version") != VERSION:
        return None
    history = tuple(EpochStart(Epoch(epoch), Position(start)) for epoch, start in document["epochs"])
    return history, Position(document["upto"])


class EpochFile:
    """The file of one folder. Calls come from one thread at a time."""

    def __init__(self, disk: Disk, folder: str) -> None:
        self._disk = disk
        self.path = f"{folder}/{NAME}"
        self.upto = Position(0)  # what lies before may be removed from the log: its epochs are remembered

    def load(self, commit_log: CommitLog) -> History:
        """The epochs of the log, and of what it held once, the newest ``KEPT``.

        *Errors*: Corrupt for epochs that go back, and for a log that ends before what was durable once.
        """
        try:
            found = parse(read_file(self._disk, self.path))
        except FileNotFoundError:
            found = None
        else:
            if found is None:
                log.warning("%s cannot be read: the epochs are read off all batch headers", self.path)
        history, self.upto = found or ((), Position(0))
        if self.upto > commit_log.written_end:
            raise Corrupt(
                f"{self.path}: the log was durable up to position {self.upto}, it ends at {commit_log.written_end}",
                position=commit_log.written_end,
            )
        return read_on(commit_log, history, self.upto)[-KEPT:]

    def store(self, history: History, upto: Position) -> None:
        """*Effects*: durable on return; a crash leaves the old or the new one."""
        replace_file(self._disk, self.path, encode(history, upto))
        self.upto = upto

    def cut(self, history: History, end: Position) -> None:
        """Forget what lies from ``end`` on, before the log is cut there. *Effects*: durable on return."""
        if self.upto > end:
            self.store(history, end)


def read_on(commit_log: CommitLog, history: History, position: Position) -> History:
    """``history``, which is known up to ``position``, and the epochs that begin in the log from there on."""
    found = list(history)
    for at, data in commit_log.scan(max(position, commit_log.start), commit_log.written_end):
        last = found[-1].epoch if found else 0
        found += (EpochStart(Epoch(e), Position(p)) for e, p in epoch_starts(data, at, after=last))
    return tuple(found)

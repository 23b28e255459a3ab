"""A little room that is set aside when a disk gets low, so that topics can still be deleted once it is full.

A delete is an append like any other. Below ``diskReserve`` produces stop and deletes go on; where others take the rest
of the disk, nothing can be appended any more. ``DIR/reserve`` then gives its place to the delete that frees some.
"""

import contextlib

from firn_node.clock import Randomness
from firn_node.disk import Disk

BYTES = 1 << 20
NAME = "reserve"


class Reserve:
    """Methods may be called from any thread, one at a time."""

    def __init__(self, disk: Disk, data: str, randomness: Randomness) -> None:
        self._disk = disk
        self._path = f"{data}/{NAME}"
        self._randomness = randomness

    def set_aside(self) -> None:
        """Take the room, if it is not taken and there is any. *Effects*: it is taken on the disk, not in a cache."""
        if self._disk.exists(self._path):
            return
        try:
            file = self._disk.open(self._path, "create")
            try:
                file.pwrite([self._randomness.bytes(BYTES)], 0)  # zeros may take no room
                file.sync()
            finally:
                file.close()
        except OSError:
            self.give_back()

    def give_back(self) -> bool:
        """Whether there was any to give."""
        if not self._disk.exists(self._path):
            return False
        with contextlib.suppress(OSError):
            self._disk.unlink(self._path)
        return True

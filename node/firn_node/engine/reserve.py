"""A little room that is set aside when a disk gets low, so that topics can still be deleted once it is full.

A delete is an append like any other. Below ``diskReserve`` produces stop and deletes go on; where others take the rest
of the disk, nothing can be appended any more. ``DIR/reserve`` then gives its place to the delete that frees some.

Invariants: what was given back is free on return, though it was just being set aside; and it is left to who asked for
it, until it is looked after the next time but one.
"""

import contextlib
import threading

from firn_node.clock import Randomness
from firn_node.disk import Disk

BYTES = 1 << 20
NAME = "reserve"


class Reserve:
    """Methods may be called from any thread."""

    def __init__(self, disk: Disk, data: str, randomness: Randomness) -> None:
        self._disk = disk
        self._path = f"{data}/{NAME}"
        self._randomness = randomness
        self._lock = threading.Lock()
        self._was_given = False

    def set_aside(self) -> None:
        """Take the room, if it is not taken and there is any. *Effects*: it is taken on the disk, not in a cache."""
        with self._lock:
            was_given, self._was_given = self._was_given, False
            if was_given or self._disk.exists(self._path):
                return
            try:
                file = self._disk.open(self._path, "create")
                try:
                    file.pwrite([self._randomness.bytes(BYTES)], 0)  # zeros may take no room
                    file.sync()
                finally:
                    file.close()
            except OSError:
                self._remove()

    def give_back(self) -> bool:
        """Whether there was any to give."""
        with self._lock:
            if not self._disk.exists(self._path):
                return False
            self._was_given = True
            self._remove()
            return True

    def _remove(self) -> None:
        with contextlib.suppress(OSError):
            self._disk.unlink(self._path)

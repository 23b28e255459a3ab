"""The room that is set aside for deletes, seen from two threads."""

import threading
from pathlib import Path
from typing import Any

from firn_node.clock import RealRandomness
from firn_node.disk import RealDisk
from firn_node.engine.reserve import NAME, Reserve


class SlowFile:
    """Its sync waits until it is let go on."""

    def __init__(self, file: Any, disk: "SlowDisk") -> None:
        self._file = file
        self._disk = disk

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def sync(self) -> None:
        self._disk.syncing.set()
        assert self._disk.may_sync.wait(60)
        self._file.sync()


class SlowDisk(RealDisk):
    def __init__(self, data: str) -> None:
        super().__init__(data)
        self.syncing, self.may_sync = threading.Event(), threading.Event()

    def open(self, *arguments: Any, **options: Any) -> Any:
        return SlowFile(super().open(*arguments, **options), self)


def test_a_delete_on_a_full_disk_finds_the_room_free_that_was_just_being_set_aside(tmp_path: Path) -> None:
    disk = SlowDisk(str(tmp_path))
    reserve = Reserve(disk, str(tmp_path), RealRandomness())
    housekeeping = threading.Thread(target=reserve.set_aside)
    housekeeping.start()
    assert disk.syncing.wait(60)
    given: list[bool] = []
    delete = threading.Thread(target=lambda: given.append(reserve.give_back()))
    delete.start()
    delete.join(0.2)
    assert given == []  # the file is still open: its bytes would not be free
    disk.may_sync.set()
    housekeeping.join()
    delete.join()
    assert given == [True]
    assert not (tmp_path / NAME).exists()


def test_room_that_was_given_back_is_left_to_who_asked_for_it(tmp_path: Path) -> None:
    reserve = Reserve(RealDisk(str(tmp_path)), str(tmp_path), RealRandomness())
    reserve.set_aside()
    assert reserve.give_back()
    reserve.set_aside()  # housekeeping that was about to look
    assert not (tmp_path / NAME).exists()
    reserve.set_aside()
    assert (tmp_path / NAME).exists()

"""A large file's name goes at once; its space comes back piece by piece, and never under somebody who reads it."""

import contextlib
import os
import threading
import time
from pathlib import Path

import pytest

from firn_node.freeing import LARGE_BYTES_MIN, PAUSE_STEPS, STEP_BYTES, SpaceFreer

PATIENCE_S = 60.0


def settled(freer: SpaceFreer) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while freer.backlog_bytes:
        assert time.monotonic() < deadline, f"{freer.backlog_bytes} bytes are still to be given back"
        time.sleep(0.002)


def large_file(folder: Path, name: str = "f", size: int = 5 * STEP_BYTES // 2) -> str:
    path = folder / name
    with path.open("wb") as file:
        file.write(b"first")
        file.truncate(size)
    return str(path)


class Cuts:
    """What a freer cut, and how long it paused."""

    def __init__(self, *, took_s: float = 0.0) -> None:
        self.ends: list[int] = []
        self.pauses: list[float] = []
        self._took_s = took_s
        self.gate = threading.Event()
        self.gate.set()

    def cut(self, fd: int, end: int) -> None:
        assert self.gate.wait(PATIENCE_S)
        os.ftruncate(fd, end)
        time.sleep(self._took_s)
        self.ends.append(end)


def test_a_large_file_loses_its_name_at_once_and_its_space_in_steps_from_the_end(tmp_path: Path) -> None:
    cuts = Cuts()
    freer = SpaceFreer(cut=cuts.cut, sleep=cuts.pauses.append)
    path, size = large_file(tmp_path), 5 * STEP_BYTES // 2
    cuts.gate.clear()
    freer.unlink(path)
    assert not os.path.exists(path)
    assert freer.backlog_bytes == size
    cuts.gate.set()
    settled(freer)
    assert cuts.ends == [size - STEP_BYTES, size - 2 * STEP_BYTES]


def test_the_disk_is_left_alone_between_two_steps_for_longer_than_one_took(tmp_path: Path) -> None:
    cuts = Cuts(took_s=0.01)
    freer = SpaceFreer(cut=cuts.cut, sleep=cuts.pauses.append)
    freer.unlink(large_file(tmp_path))
    settled(freer)
    assert len(cuts.pauses) == 2
    assert all(pause >= PAUSE_STEPS * 0.01 for pause in cuts.pauses)


def test_a_long_backlog_is_given_back_without_pauses(tmp_path: Path) -> None:
    cuts = Cuts()
    freer = SpaceFreer(cut=cuts.cut, sleep=cuts.pauses.append, backlog_bytes_max=0)
    freer.unlink(large_file(tmp_path))
    settled(freer)
    assert len(cuts.ends) == 2
    assert cuts.pauses == []


def test_who_has_a_removed_file_open_reads_all_of_it(tmp_path: Path) -> None:
    freer, path = SpaceFreer(), large_file(tmp_path)
    with open(path, "rb") as reader:
        freer.unlink(path)
        settled(freer)
        assert os.fstat(reader.fileno()).st_size == 5 * STEP_BYTES // 2
        assert reader.read(5) == b"first"


def test_a_file_with_another_name_keeps_its_bytes(tmp_path: Path) -> None:
    freer, path = SpaceFreer(), large_file(tmp_path)
    os.link(path, tmp_path / "other")
    freer.unlink(path)
    settled(freer)
    assert (tmp_path / "other").stat().st_size == 5 * STEP_BYTES // 2


def test_files_are_given_back_one_after_another_and_a_later_one_too(tmp_path: Path) -> None:
    cuts = Cuts()
    freer = SpaceFreer(cut=cuts.cut, sleep=cuts.pauses.append)
    for name in ("a", "b"):
        freer.unlink(large_file(tmp_path, name))
    settled(freer)
    freer.unlink(large_file(tmp_path, "c"))
    settled(freer)
    assert len(cuts.ends) == 6


def test_a_small_file_and_a_link_to_a_large_one_are_just_unlinked(tmp_path: Path) -> None:
    freer, path = SpaceFreer(), large_file(tmp_path)
    small = large_file(tmp_path, "small", LARGE_BYTES_MIN - 1)
    (tmp_path / "link").symlink_to(path)
    freer.unlink(small)
    freer.unlink(str(tmp_path / "link"))
    assert freer.backlog_bytes == 0
    assert os.listdir(tmp_path) == ["f"]
    assert os.stat(path).st_size == 5 * STEP_BYTES // 2


def test_without_room_for_a_thread_a_large_file_goes_in_one_piece(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    freer = SpaceFreer()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", no_room)
        path = large_file(tmp_path)
        freer.unlink(path)
        assert not os.path.exists(path)
        assert freer.backlog_bytes == 0
        assert not is_open(path)
    cuts = large_file(tmp_path, "later")
    freer.unlink(cuts)
    settled(freer)


def is_open(path: str) -> bool:
    """Whether this process has a descriptor of a file that was called so."""
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # others of this process are closed meanwhile
            if os.readlink(f"/proc/self/fd/{descriptor}").startswith(path):
                return True
    return False


def no_room(thread: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")

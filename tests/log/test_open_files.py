"""A removed file is opened no more, not even in the moment in which its name goes."""

from collections.abc import Callable
from pathlib import Path

import pytest

from firn_node.disk import RealDisk
from firn_node.filecache import FileCache


class _WatchedDisk(RealDisk):
    """``meanwhile``: what another thread does right before a name goes."""

    meanwhile: Callable[[str], None]

    def unlink(self, path: str) -> None:
        self.meanwhile(path)
        super().unlink(path)


def removed_at_once(cache: FileCache, path: str) -> None:
    cache.retire(path)


def removed_after_its_last_reader(cache: FileCache, path: str) -> None:
    with cache.reading(path):
        cache.retire(path)


@pytest.mark.parametrize("remove", [removed_at_once, removed_after_its_last_reader])
def test_the_next_file_of_a_name_is_read_whoever_asked_while_the_first_one_went(
    tmp_path: Path, remove: Callable[[FileCache, str], None]
) -> None:
    path = str(tmp_path / "00000000000000000000.log")
    disk = _WatchedDisk(tmp_path)
    cache = FileCache(disk, limit=8)
    asked: list[str] = []

    def ask(path: str) -> None:
        asked.append(path)
        with pytest.raises(FileNotFoundError):
            cache.lease(path)

    disk.meanwhile = ask
    Path(path).write_bytes(b"first")
    remove(cache, path)
    assert asked == [path]
    Path(path).write_bytes(b"other")
    with cache.reading(path) as file:
        assert file.pread(5, 0) == b"other"
    cache.close()


def test_a_file_whose_name_could_not_be_taken_is_read_as_before(tmp_path: Path) -> None:
    path = str(tmp_path / "f")
    disk = _WatchedDisk(tmp_path)
    cache = FileCache(disk, limit=8)

    def fail(path: str) -> None:
        raise OSError(5, "input/output error")

    disk.meanwhile = fail
    Path(path).write_bytes(b"there")
    with pytest.raises(OSError, match="input/output"):
        cache.retire(path)
    with cache.reading(path) as file:
        assert file.pread(5, 0) == b"there"
    cache.close()

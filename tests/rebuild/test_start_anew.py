"""A folder that is ordered to start anew: nothing of it is kept, whatever crashes on the way."""

from pathlib import Path

import pytest

from firn.errors import Corrupt
from firn_node import failpoints
from firn_node.disk import RealDisk
from firn_node.rebuild.folder import Order, carry_out, is_ordered, order

LEFT = {"LOCK", "audit.log"}  # of the process, not of the replica


class Crash(Exception):
    pass


def used_folder(path: Path) -> Path:
    for name in ("log", "index/rocksdb", "compacted/17/0", "rebuild/compacted"):
        (path / name).mkdir(parents=True)
        (path / name / "file").write_bytes(b"bytes")
    for name in ("group", "epochs", "identity", *LEFT):
        (path / name).write_bytes(b"bytes")
    return path


def test_a_folder_is_emptied_once_and_only_when_it_is_ordered(tmp_path: Path) -> None:
    folder, disk = used_folder(tmp_path), RealDisk(tmp_path)
    assert carry_out(disk, str(folder)) is None
    assert (folder / "identity").exists()
    order(disk, str(folder), Order("a test", "aa"))
    assert carry_out(disk, str(folder)) == Order("a test", "aa")
    assert {path.name for path in folder.iterdir()} == LEFT
    assert carry_out(disk, str(folder)) is None


@pytest.mark.parametrize("keeps_log", [False, True])
def test_a_crash_at_any_step_leaves_a_folder_that_starts_anew(tmp_path: Path, keeps_log: bool) -> None:
    crashes = 0
    for stop_at in range(1, 100):
        folder = used_folder(tmp_path / str(stop_at))
        disk = RealDisk(folder)
        order(disk, str(folder), Order("a test", "aa", keeps_log))
        left = stop_at

        def crash(name: str) -> None:
            nonlocal left
            left -= 1
            if left == 0:
                raise Crash(name)

        failpoints.hook = crash
        try:
            carry_out(disk, str(folder))
        except Crash:
            crashes += 1
            assert is_ordered(disk, str(folder))
        finally:
            failpoints.hook = None
        carry_out(disk, str(folder))
        found = {path.name for path in folder.iterdir()}
        assert found == (LEFT | {"given-up"} if keeps_log else LEFT)
        if keeps_log:
            assert (folder / "given-up/aa/log/file").read_bytes() == b"bytes"
        if left > 0:
            break
    assert crashes > 7


def test_a_damaged_order_is_not_carried_out(tmp_path: Path) -> None:
    folder, disk = used_folder(tmp_path), RealDisk(tmp_path)
    order(disk, str(folder), Order("a test", "aa"))
    path = folder / "REBUILD"
    path.write_bytes(path.read_bytes()[:-1] + b"\xff")
    with pytest.raises(Corrupt, match="REBUILD"):
        carry_out(disk, str(folder))
    assert (folder / "identity").exists()

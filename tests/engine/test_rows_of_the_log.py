"""Single rows of the commit log: runs of small batches that grow, expired and damaged ones; many reads at once."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from firn.errors import Corrupt
from firn_node.compaction.answers import joined
from firn_node.disk import File, RealDisk, gather
from support.engine_kit import run, running


def test_rows_of_small_batches_are_found_while_their_run_grows(tmp_path: Path) -> None:
    async def main() -> None:
        async with running(tmp_path) as kit:
            await kit.create("t")
            await kit.create("other")
            for n in range(60):
                await kit.put("t", [(b"key%d" % n, b"v%d" % n), (b"hot", b"%d" % n)])
                assert await kit.get("t", b"hot") == b"%d" % n
                assert await kit.get("t", b"key%d" % (n // 2)) == b"v%d" % (n // 2)
                if n % 20 == 19:
                    await kit.put("other", [(b"k", b"v")])  # ends the run
            keys = [b"key%d" % n for n in range(60)]
            found = await kit.broker.get("t", [*keys, b"hot", b"none"])
            assert [f and f.value for f in found] == [*(b"v%d" % n for n in range(60)), b"59", None]

    run(main())


@pytest.mark.parametrize("count", [1, 30])
def test_a_damaged_batch_of_the_log_is_corrupt_at_the_first_touch(tmp_path: Path, count: int) -> None:
    async def main() -> None:
        async with running(tmp_path) as kit:
            await kit.create("t")
            for n in range(30):
                await kit.put("t", [(b"key%d" % n, b"value %d." % n)])
            await kit.broker.checkpoint()
            (file,) = [f for f in tmp_path.rglob("*.log") if b"value 29." in f.read_bytes()]
            good = file.read_bytes()
            at = good.index(b"value 29.")
            with file.open("r+b") as opened:
                opened.seek(at)
                opened.write(b"V")
            with pytest.raises(Corrupt, match="commit log position"):
                await kit.broker.get("t", [b"key%d" % (29 - n) for n in range(count)])
            with file.open("r+b") as opened:
                opened.seek(at)
                opened.write(b"v")
            assert await kit.get("t", b"key29") == b"value 29."

    run(main())


def test_keys_are_found_while_compactions_take_their_rows_away(tmp_path: Path) -> None:
    async def main() -> None:
        async with running(tmp_path, log_segment_bytes=256 << 10) as kit:
            await kit.create("t", compaction={"deleteRetention": "0s"})
            keys = [b"key%05d" % n for n in range(2000)]
            done = asyncio.Event()

            async def compactions() -> None:
                for _ in range(6):
                    await kit.compact("t")
                done.set()

            latest = -1
            await kit.put("t", [(key, b"%09d" % 0) for key in keys])
            compacting = asyncio.create_task(compactions())
            for step in range(200):
                if done.is_set() and step > 8:
                    break
                await kit.put("t", [(key, b"%09d" % step) for key in keys])
                latest = step
                answers = await kit.broker.get_many("t", *joined(keys))
                assert answers.values().tobytes() == b"%09d" % latest * len(keys)
            await compacting
            answers = await kit.broker.get_many("t", *joined(keys))
            assert answers.values().tobytes() == b"%09d" % latest * len(keys)

    run(main())


@pytest.mark.parametrize("is_compacted", [False, True])
def test_few_keys_of_many_large_batches_are_found_again_and_again(tmp_path: Path, is_compacted: bool) -> None:
    """From the second time on where their rows lie is known; the log has several files."""

    async def main() -> None:
        async with running(tmp_path, log_segment_bytes=256 << 10) as kit:
            await kit.create("t", compaction={"deleteRetention": "0s"})
            for batch in range(12):
                rows = [(b"key%02d-%03d" % (batch, n), b"%02d-%03d;" % (batch, n) * 120) for n in range(200)]
                await kit.put("t", rows)
                await kit.put("t", [(b"gone%02d-%03d" % (batch, n), None) for n in range(200)])
            await kit.put(
                "t", [(b"key%02d-%03d" % (5, n), b"%02d+%03d;" % (5, n) * 120) for n in range(1, 200, 2)]
            )
            if is_compacted:
                await kit.compact("t")
            numbers = [(batch, n) for n in (0, 1, 77, 199) for batch in range(12)]
            keys = [b"key%02d-%03d" % at for at in numbers]
            wanted = [
                (b"%02d+%03d;" if b == 5 and n % 2 else b"%02d-%03d;") % (b, n) * 120 for b, n in numbers
            ]
            others = [b"key03-0777", b"gone03-077", b"none"]
            for _ in range(4):
                found = await kit.broker.get("t", [*keys, *others])
                assert [f and f.value for f in found] == [*wanted, None, None, None]
                one_by_one = [(await kit.broker.get("t", [key]))[0] for key in keys]
                assert found[: len(keys)] == one_by_one
                answers = await kit.broker.get_many("t", *joined(keys), bytes_max=1)
                assert 0 < np.count_nonzero(answers.lengths > 0) <= len(keys)

    run(main())


class _NoDescriptor:
    """A file of a simulated disk."""

    def __init__(self, file: File) -> None:
        self._file = file

    def fileno(self) -> None:
        return None

    def __getattr__(self, name: str) -> object:
        return getattr(self._file, name)


@pytest.mark.parametrize("has_descriptor", [True, False])
def test_ranges_of_a_file_are_read_together_or_not_at_all(tmp_path: Path, has_descriptor: bool) -> None:
    data = bytes(range(256)) * 10
    (tmp_path / "f").write_bytes(data)
    file: File = RealDisk(str(tmp_path)).open(str(tmp_path / "f"))
    read: Any = file if has_descriptor else _NoDescriptor(file)
    positions, sizes = np.array([5, 2000, 0, 5]), np.array([10, 560, 0, 1])
    found = gather(read, positions, sizes)
    assert found is not None
    assert found.tobytes() == data[5:15] + data[2000:2560] + data[5:6]
    assert gather(read, np.array([0, 2555]), np.array([3, 6])) is None
    none = np.empty(0, np.int64)
    nothing = gather(read, none, none)
    assert nothing is not None
    assert nothing.tobytes() == b""
    file.close()

"""File systems that are really full: small ones of the test's own in memory, where its rights allow them."""

import asyncio
import contextlib
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from engine_kit import Kit, run, settings
from group_kit import Replica, broker_group

from firn.errors import FirnError, ReadOnly, UnknownTopic
from firn.topicspec import parse_spec
from firn_node.engine.broker import Broker
from firn_node.engine.reserve import NAME

SIZE_MIB = 64


class Volume:
    """A file system of 64 MiB that can be filled."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir(parents=True, exist_ok=True)
        made = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={SIZE_MIB}m", "none", str(path)], capture_output=True, check=False
        )  # fmt: skip
        if made.returncode:
            pytest.skip(f"no file system can be mounted here: {made.stderr.decode().strip()}")

    def fill(self, *, but: int = 0) -> None:
        """Let others take what is free, but for so many bytes."""
        with open(self.path / "others", "ab", buffering=0) as file, contextlib.suppress(OSError):
            left = self._free() - but
            while left > 0:
                left -= file.write(bytes(min(left, 1 << 20)))
            while not but:
                file.write(bytes(4096))

    def _free(self) -> int:
        found = os.statvfs(self.path)
        return found.f_bavail * found.f_frsize

    def free(self) -> None:
        (self.path / "others").unlink()

    def close(self) -> None:
        subprocess.run(["umount", "-l", str(self.path)], check=True)


@pytest.fixture
def volumes() -> Iterator[Callable[[Path], Volume]]:
    made: list[Volume] = []

    def make(path: Path) -> Volume:
        made.append(Volume(path))
        return made[-1]

    yield make
    for volume in made:
        volume.close()


async def until(holds: Callable[[], object], what: str) -> None:
    end = asyncio.get_running_loop().time() + 60
    while not holds():
        assert asyncio.get_running_loop().time() < end, f"never happened: {what}"
        await asyncio.sleep(0.02)


def test_topics_can_be_deleted_on_a_full_disk_which_then_takes_writes_again(
    tmp_path: Path, volumes: Callable[[Path], Volume]
) -> None:
    async def story() -> None:
        volume = volumes(tmp_path / "data")
        broker = Broker(settings(tmp_path / "data", disk_reserve=0.05))
        await broker.start()
        kit = Kit(broker)
        gone = [f"gone-{number}" for number in range(60)]  # more records than fit into the log's last page
        for name in ("kept", *gone):
            await broker.create_topic(name, parse_spec({}))
        for name in ("kept", gone[0]):
            await kit.put(name, [(b"k%d" % number, bytes(1000)) for number in range(100)])
        volume.fill(but=2 << 20)  # 3 % of it
        await until((volume.path / NAME).exists, "the low disk was seen")
        volume.fill()
        with pytest.raises(ReadOnly):
            await kit.put("kept", [(b"k", b"v")])
        with pytest.raises(ReadOnly):
            await broker.create_topic("new", parse_spec({}))
        for name in gone:
            await broker.delete_topic(name)
            with pytest.raises(UnknownTopic):
                broker.topic(name)
        volume.free()
        await until(lambda: broker.core.health.read_only is None, "there is room again")
        await kit.put("kept", [(b"k", b"v")])
        await broker.checkpoint()
        await until(lambda: not (volume.path / NAME).exists(), "the room that was set aside is free again")
        assert broker.core.health.failed is None
        await broker.stop()
        broker = Broker(settings(tmp_path / "data", disk_reserve=0.05))
        await broker.start()
        assert [topic.name for topic in broker.topics()] == ["kept"]
        found = await broker.get("kept", [b"k", b"k99"])
        assert [row.value for row in found if row is not None] == [b"v", bytes(1000)]
        await broker.stop()

    run(story())


async def put(replica: Replica, value: bytes) -> None:
    await replica.kit.put("t", [(b"k", value)])


def test_a_master_whose_disk_is_full_gives_way_and_comes_back_without_a_restart(
    tmp_path: Path, volumes: Callable[[Path], Volume]
) -> None:
    async def story() -> None:
        made = [volumes(tmp_path / str(number)) for number in range(2)]
        async with broker_group(tmp_path, 2, disk_reserve=0.05) as group:
            first = await group.until_master()
            await first.broker.create_topic("t", parse_spec({"durability": {"minInSync": 1}}))
            await put(first, b"1")
            made[first.ordinal].fill()
            with contextlib.suppress(FirnError):  # refused, or handed over by then
                await put(first, bytes(100_000))
            second = await group.until_master(other_than=first)
            for number in range(20):
                await put(second, b"%d " % number + bytes(100_000))
            made[first.ordinal].free()
            await group.until_equal()
            await group.until_in_sync()
            await put(second, b"2")
            await group.until_equal()
            assert await group.maps("t", [b"k"]) == [[b"2"]] * 2
            assert [replica.broker.core.health.failed for replica in group.up] == [None, None]

    run(story(), 180)


def test_a_standby_whose_disk_is_full_becomes_master_once_there_is_room_and_not_before(
    tmp_path: Path, volumes: Callable[[Path], Volume]
) -> None:
    async def story() -> None:
        made = [volumes(tmp_path / str(number)) for number in range(2)]
        async with broker_group(tmp_path, 2, disk_reserve=0.05) as group:
            first = await group.until_master()
            await first.broker.create_topic("t", parse_spec({"durability": {"minInSync": 1}}))
            await put(first, b"1")
            await group.until_equal()
            [second] = [replica for replica in group.up if replica is not first]
            made[second.ordinal].fill()
            await first.fail()
            await until(lambda: second.broker.group.trouble, "it cannot store what it would have to promise")
            assert group.master() is None
            made[second.ordinal].free()
            assert await group.until_master() is second
            await put(second, b"2")
            assert (await second.kit.get("t", b"k")) == b"2"
            assert second.broker.core.health.failed is None
            await first.start()
            await group.until_in_sync()

    run(story(), 180)

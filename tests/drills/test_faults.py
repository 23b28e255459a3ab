"""What a broker does to itself when a drill orders it, and that it does nothing without an order."""

import asyncio
import errno
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from engine_kit import settings
from firn_cli.calls import Run

from firn_node.clock import RealClock
from firn_node.coordinator import MemoryCoordinator, Records
from firn_node.coordinator.api import Absent, Unreachable
from firn_node.drills import chaos, damage, faults, table
from firn_node.drills.faults import FaultFile, FaultyClock, FaultyCoordinator, FaultyDisk, Orders
from firn_node.drills.verdict import Result
from firn_node.engine.broker import Broker
from firn_node.replication.doors.peers import Dialling
from firn_node.replication.record import GroupId


def ordered(tmp_path: Path, **orders: Any) -> Orders:
    file = FaultFile(str(tmp_path / "orders"))
    file.set(**orders)
    return Orders(file.path)


def test_a_write_and_a_sync_fail_as_ordered(tmp_path: Path) -> None:
    disk = FaultyDisk(str(tmp_path), ordered(tmp_path, write="ENOSPC", sync="EIO"))
    (tmp_path / "file").write_bytes(b"")
    file = disk.open(str(tmp_path / "file"), "write")
    with pytest.raises(OSError, match="No space") as full:
        file.pwrite([b"x"], 0)
    with pytest.raises(OSError) as failed:
        file.sync()
    with pytest.raises(OSError):
        disk.open(str(tmp_path / "other"), "create")
    assert (full.value.errno, failed.value.errno) == (errno.ENOSPC, errno.EIO)
    assert disk.free()[0] == 0
    file.close()


def test_without_an_order_a_disk_and_a_clock_are_as_the_machine_s(tmp_path: Path) -> None:
    orders = ordered(tmp_path)
    disk = FaultyDisk(str(tmp_path), orders)
    file = disk.open(str(tmp_path / "file"), "create")
    assert file.pwrite([b"abc"], 0) == 3
    file.sync()
    assert file.pread(3, 0) == b"abc"
    file.close()
    before, clock = RealClock(), FaultyClock(orders)
    low = before.wall_ms()
    assert low <= clock.wall_ms() <= before.wall_ms()


def test_a_new_order_is_followed_soon(tmp_path: Path) -> None:
    file = FaultFile(str(tmp_path / "orders"))
    file.set(write="EIO")
    orders = Orders(file.path)
    assert orders.now().write == "EIO"

    async def until_cleared() -> None:
        while orders.now().write is not None:
            await asyncio.sleep(0.01)

    file.clear()
    asyncio.run(asyncio.wait_for(until_cleared(), 60))


def test_a_clock_jumps_in_wall_time_only_and_drifts_in_both(tmp_path: Path) -> None:
    real, clock = RealClock(), FaultyClock(ordered(tmp_path, jump_s=3600.0, drift=1.0))
    began, wall = clock.monotonic(), real.wall_ms()
    real_began = real.monotonic()
    while real.monotonic() < real_began + 0.05:
        pass
    assert clock.monotonic() - began >= 0.1
    assert clock.wall_ms() - wall >= 3600_000 + 100


def test_a_cut_coordinator_gives_no_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faults, "ANSWER_S", 0.01)

    async def story() -> None:
        inner = MemoryCoordinator(Records())
        well = FaultyCoordinator(inner, ordered(tmp_path))
        assert isinstance(await well.read(GroupId("0")), Absent)
        cut = FaultyCoordinator(inner, ordered(tmp_path, coordinator="down"))
        assert isinstance(await cut.read(GroupId("0")), Unreachable)
        watching = cut.watch(GroupId("0"))
        assert isinstance(await anext(watching), Unreachable)
        await watching.aclose()
        await cut.close()

    asyncio.run(story())


def test_a_spoiled_broker_stores_through_its_faulty_disk_and_dials_by_its_routes(tmp_path: Path) -> None:
    file = FaultFile(str(tmp_path / "orders"))
    file.set(routes={"127.0.0.1:1": "127.0.0.1:2"}, write="ENOSPC")
    parts = faults.spoiled(file.path, str(tmp_path), coordinator=None, dialling=Dialling())
    assert parts["dialling"].routes == {"127.0.0.1:1": "127.0.0.1:2"}

    async def story() -> None:
        broker = Broker(settings(tmp_path / "data"), disk=parts["disk"], clock=parts["clock"])
        with pytest.raises(OSError, match="No space"):
            await broker.start()

    asyncio.run(story())


def test_random_faults_follow_from_their_seed() -> None:
    def planned(seed: int) -> list[chaos.Fault]:
        return chaos.plan(chaos.random.Random(seed), seconds=20, ttl_s=3, nodes=3)

    assert planned(7) == planned(7)
    assert planned(7) != planned(8)
    assert {fault.kind for seed in range(200) for fault in planned(seed)} == set(chaos.KINDS)


def test_a_result_takes_the_place_of_the_older_one_of_its_drill(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n{table.START}\n{table.END}\nafter\n")
    table.update(page, [Result("kill-master", 1), Result("pause-master", 1)], 3.0)
    table.update(page, [Result("kill-master", 2, why=["lost"])], 3.0)
    lines = page.read_text().splitlines()
    rows = [line for line in lines if line.startswith("| `")]
    assert [row.split("`")[1] for row in rows] == ["kill-master", "pause-master"]
    assert "| 2 | FAILED |" in rows[0]
    assert "| 1 | passed |" in rows[1]
    assert (lines[0], lines[-1]) == ("before", "after")


@pytest.fixture
def run_firn() -> Run:
    from firn_cli.calls import call

    return call


def test_the_drills_are_listed(run_firn: Callable[..., Any]) -> None:
    found = run_firn("drill", "list").stdout.decode()
    assert "kill-master" in found
    assert "gap <= 5 s, another master" in found
    assert run_firn("drill", "run", "no-such-drill", code=2).stderr


def test_a_log_that_was_not_begun_has_no_torn_tail(tmp_path: Path) -> None:
    assert "not begun" in damage.append_torn_tail(tmp_path, random.Random(1))

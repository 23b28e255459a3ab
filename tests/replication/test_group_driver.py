"""Three drivers in one process, with real logs and real connections: what the rules promise survives their I/O."""

import asyncio
from pathlib import Path

import pytest
from engine_kit import run
from replica_kit import GROUP, Group, Node, group

from firn.errors import NotEnoughInSync, NotMaster, Timeout, Unavailable
from firn_node.replication.doors.groupfile import GroupFile
from firn_node.replication.state import Role


def others(found: Group, master: Node) -> list[Node]:
    return [node for node in found.up if node is not master]


def test_what_a_master_acknowledges_is_in_every_in_sync_log_byte_for_byte(tmp_path: Path) -> None:
    async def story() -> None:
        async with group(tmp_path) as found:
            await found.write(10, min_in_sync=3)
            master = await found.until_master()
            assert len({node.log.durable_end for node in found.nodes}) == 1
            assert len({node.content(4096, node.log.durable_end) for node in found.nodes}) == 1
            for node in others(found, master):
                with pytest.raises(NotMaster) as refused:
                    node.driver.admit(1)
                assert refused.value.details["address"] == master.door.address
            with pytest.raises(NotEnoughInSync):
                master.driver.admit(4)

    run(story())


def test_a_killed_master_is_replaced_and_comes_back_as_a_standby(tmp_path: Path) -> None:
    async def story() -> None:
        async with group(tmp_path) as found:
            await found.write(5, min_in_sync=2)
            first = await found.until_master()
            await first.kill()
            second = await found.until_master(other_than=first)
            await found.write(5, min_in_sync=2)
            await first.start()
            await found.until_in_sync(*found.nodes)
            assert (first.driver.role, second.driver.role) == (Role.STANDBY, Role.MASTER)

    run(story())


def test_a_master_that_is_cut_off_stops_by_itself_and_its_unacknowledged_tail_is_cut(tmp_path: Path) -> None:
    async def story() -> None:
        async with group(tmp_path) as found:
            await found.write(5, min_in_sync=2)
            first = await found.until_master()
            first.coordinator.cut()
            first.door.shut()
            for node in others(found, first):
                node.door.shut(first.log_id)
            lost = [asyncio.create_task(first.write(1000 + i)) for i in range(20)]
            await asyncio.sleep(0)
            tail = first.log.written_end
            second = await found.until_master(other_than=first)
            with pytest.raises((NotMaster, Unavailable)):
                first.driver.admit(1)
            await found.write(5, min_in_sync=2)
            assert not any(task.done() and task.exception() is None for task in lost)
            first.coordinator.heal()
            for node in found.nodes:
                node.door.reopen()
            outcomes = await asyncio.gather(*lost, return_exceptions=True)
            assert {type(outcome) for outcome in outcomes} == {Timeout}
            await found.until_in_sync(*found.nodes)
            assert [end for end in first.engine.cuts if end < tail]
            assert second.driver.role is Role.MASTER

    run(story())


def test_a_standby_that_was_away_catches_up_over_large_and_small_batches(tmp_path: Path) -> None:
    async def story() -> None:
        async with group(tmp_path) as found:
            master = await found.until_master()
            away = others(found, master)[0]
            await away.kill()
            for size in (300, 3 << 20, 200_000, 900_000, 5 << 20):
                await found.write(1, size=size)
            await found.write(200)
            await away.start()
            await found.until_in_sync(*found.nodes)

    run(story())


def test_a_standby_that_cannot_be_reached_leaves_the_in_sync_set_and_writes_go_on(tmp_path: Path) -> None:
    async def story() -> None:
        async with group(tmp_path) as found:
            master = await found.until_master()
            away = others(found, master)[0]
            master.door.shut(away.log_id)
            await found.until(lambda: away.log_id not in found.records.by_group[GROUP].in_sync, "it left")
            await found.write(5, min_in_sync=2)
            with pytest.raises(NotEnoughInSync):
                master.driver.admit(3)
            master.door.reopen()

    run(story())


def test_bytes_that_were_damaged_on_their_way_are_refused_and_sent_anew(tmp_path: Path) -> None:
    async def story() -> None:
        async with group(tmp_path) as found:
            master = await found.until_master()
            master.door.flips = 2
            await found.write(5, size=100_000, min_in_sync=3)
            assert master.door.flips == 0

    run(story())


def test_log_bytes_that_arrive_slowly_are_progress_before_their_frame_is_whole(tmp_path: Path) -> None:
    async def story() -> None:
        async with group(tmp_path, 2) as found:
            master = await found.until_master()
            [standby] = others(found, master)
            assert standby.driver.state.following is not None
            progress, handshake = standby.driver.state.following.progress_at, standby.driver.state.handshakes
            master.door.rate = 2 << 20
            end = standby.log.written_end
            writing = asyncio.create_task(found.write(1, size=3 << 20))
            times = set()
            while standby.log.written_end == end:
                following = standby.driver.state.following
                times.add(following.progress_at if following is not None else 0.0)
                await asyncio.sleep(0.02)
            assert len(times - {progress}) >= 5  # one a tick
            assert standby.driver.state.handshakes == handshake
            await writing
            master.door.rate = 0

    run(story())


def test_a_switchover_hands_over_to_the_named_standby_without_losing_a_write(tmp_path: Path) -> None:
    async def story() -> None:
        async with group(tmp_path) as found:
            await found.write(5, min_in_sync=2)
            master = await found.until_master()
            target = others(found, master)[-1]
            writing = asyncio.create_task(found.write(40))
            await master.driver.switchover(target.log_id)
            assert await found.until_master(other_than=master) is target
            await writing
            with pytest.raises(Unavailable, match="not the master"):
                await master.driver.switchover(target.log_id)

    run(story())


def test_a_group_that_was_stopped_cleanly_starts_with_its_log_and_says_so_once(tmp_path: Path) -> None:
    async def story() -> None:
        async with group(tmp_path) as found:
            await found.write(5, min_in_sync=3)
            for node in found.nodes:
                await node.stop()
            for node in found.nodes:
                node.boot_id, node.has_interval = "boot-2", True
                await node.start()
                assert not node.driver.state.stored.is_unclean
                assert node.driver.state.log.history[0].start == 4096
            await found.until_master()
            await found.until_in_sync(*found.nodes)

    run(story())


def test_a_machine_that_restarts_without_a_clean_stop_starts_unclean_where_interval_topics_exist(
    tmp_path: Path,
) -> None:
    async def story() -> None:
        async with group(tmp_path) as found:
            await found.write(5, min_in_sync=3)
            away = others(found, await found.until_master())[0]
            await away.kill()
            away.boot_id, away.has_interval = "boot-2", True
            await away.start()
            assert away.driver.state.wanted.is_unclean
            await found.until(lambda: not away.driver.state.stored.is_unclean, "it has its master's log")

    run(story())


def test_a_blank_replica_begins_its_log_where_its_master_s_does(tmp_path: Path) -> None:
    async def story() -> None:
        async with group(tmp_path, 2) as found:
            await found.write(8, size=400_000, min_in_sync=2)
            for node in found.nodes:
                await node.driver.checkpoint(node.engine.dispatched)
                node.driver.released(node.log.release(node.engine.dispatched))
                assert node.log.start > 4096
            blank = Node(2, tmp_path, found.records)
            found.nodes.append(blank)
            await blank.start()
            await found.until_in_sync(*found.nodes)
            assert blank.engine.begins == [blank.log.start] == [found.nodes[0].log.start]
            first = found.nodes[0]
            found.acknowledged = [
                b for b in found.acknowledged if b in first.content(first.log.start, first.log.written_end)
            ]
            assert found.acknowledged

    run(story())


def test_epochs_of_removed_bytes_are_known_after_a_restart(tmp_path: Path) -> None:
    async def story() -> None:
        async with group(tmp_path, 1) as found:
            [node] = found.nodes
            await found.write(8, size=400_000)
            history = node.driver.state.log.history
            await node.driver.checkpoint(node.engine.dispatched)
            node.driver.released(node.log.release(node.engine.dispatched))
            await node.kill()
            await node.start()
            assert node.driver.state.log.history[: len(history)] == history
            assert node.log.start > history[0].start
            await found.until_master()
            found.acknowledged.clear()

    run(story())


def test_interval_writes_are_acknowledged_once_all_have_written_them_however_late_the_sync(
    tmp_path: Path,
) -> None:
    async def story() -> None:
        async with group(tmp_path, flush_interval_s=3600.0) as found:
            for node in found.nodes:
                node.driver.topics_changed(largest_min_in_sync=1, has_interval=True)
            await found.write(10, min_in_sync=3, is_interval=True)
            master = await found.until_master()
            assert master.log.durable_end < master.log.written_end
            assert master.driver.committed < master.log.written_end
            assert {node.log.written_end for node in found.nodes} == {master.log.written_end}

    run(story())


def test_a_stop_marks_the_folder_and_a_kill_does_not(tmp_path: Path) -> None:
    async def story() -> None:
        async with group(tmp_path, 1, checks=False) as found:
            [node] = found.nodes
            await node.stop()
            stored = GroupFile(node.disk, str(node.folder), GROUP).load()
            assert stored is not None
            assert stored.was_shut_down
            await node.start()
            await found.until_master()
            epoch = node.driver.epoch
            assert epoch > stored.meta.epoch
            await node.kill()
            stored = GroupFile(node.disk, str(node.folder), GROUP).load()
            assert stored is not None
            assert not stored.was_shut_down
            assert stored.meta.epoch == epoch

    run(story())

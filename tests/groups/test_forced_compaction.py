"""A compaction by force is asked of the master and done by every replica, each on its own files."""

from pathlib import Path

from engine_kit import run
from group_kit import Replica, broker_group, clean, filled

from firn.client import Client
from firn.topicspec import parse_spec


async def force(master: Replica) -> None:
    async with Client(f"127.0.0.1:{master.port}", timeout=60) as client:
        found = await client.compact("t", force=True, wait=True)
        assert [row["records_after"] for row in found["partitions"]] == [5]


def test_every_replica_compacts_when_the_master_is_asked_to_and_again_when_it_is_asked_again(
    tmp_path: Path,
) -> None:
    async def story() -> None:
        async with broker_group(tmp_path, 3) as group:
            master = await filled(group)
            await force(master)
            await group.until(lambda: all(clean(each) == (5, 30) for each in group.up), "all have compacted")
            await master.kit.put("t", [(b"k1", b"again")])
            await master.broker.update_topic("t", parse_spec({"durability": {"minInSync": 2}}))
            await group.until_equal()
            assert all(clean(each) == (5, 30) for each in group.up), "a change of the spec asks for nothing"
            await force(master)
            await group.until(lambda: all(clean(each) == (5, 31) for each in group.up), "all have again")
            assert (await group.maps("t", [b"k1"])) == [[b"again"]] * 3

    run(story())


def test_a_standby_that_was_away_compacts_when_it_is_back_and_none_does_at_a_mere_start(
    tmp_path: Path,
) -> None:
    async def story() -> None:
        async with broker_group(tmp_path, 2) as group:
            master = await filled(group)
            [standby] = [each for each in group.up if each is not master]
            await standby.stop()
            await force(master)
            await standby.start()
            await group.until(lambda: clean(standby) == (5, 30), "it has compacted")
            await group.until_in_sync()
            for replica in (standby, master):
                await replica.stop()
            for replica in (standby, master):
                await replica.start()
            await group.until_equal()
            assert [replica.broker.compaction("t") for replica in group.up] == [None, None]

    run(story())


def test_a_replica_that_ends_while_it_compacts_does_so_when_it_is_back_and_only_once(tmp_path: Path) -> None:
    """The order was dispatched, so that no replay repeats it: it was forgotten."""

    async def story() -> None:
        async with broker_group(tmp_path, 2) as group:
            master = await filled(group)
            [standby] = [each for each in group.up if each is not master]
            await standby.stop()
            standby.changes = {"io_bytes_per_second": 1}
            await standby.start()
            await force(master)
            await group.until_equal()
            await group.until(
                lambda: (
                    (run := standby.broker.compaction("t")) is not None
                    and run.partitions[0].state == "running"
                ),
                "it has begun",
            )
            await standby.stop()
            standby.changes = {}
            await standby.start()
            await group.until(lambda: clean(standby) == (5, 30), "it has compacted")
            await standby.stop()
            await standby.start()
            await group.until(standby.broker.is_ready, "it follows its master")
            await group.until(lambda: standby.broker.parts.upkeep.knows_states, "it knows its partitions")
            assert standby.broker.compaction("t") is None

    run(story())

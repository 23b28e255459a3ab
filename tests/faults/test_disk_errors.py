"""ENOSPC and EIO at every write and every sync of a fixed workload, and what the broker says of each.

``FIRN_FAULTS=all`` fails every operation in turn; else a bounded number is drawn from a seed that failures print.
"""

import asyncio
import errno
import os
import random
from collections.abc import Callable

import pytest
from engine_kit import Kit, run
from fault_kit import Machine, PowerDisk, machine

from firn.errors import FirnError, ReadOnly, Unavailable
from firn.topicspec import parse_spec

SEED = int(os.environ.get("FIRN_SEED", "20260"))
SAMPLE = 24
WRITES = frozenset({"create", "pwrite", "truncate", "rename", "unlink", "make_folder"})
SYNCS = frozenset({"sync", "sync_folder"})
SPEC = {"compaction": {"deleteRetention": "0s", "memory": "64Ki"}, "retention": {"size": "4Ki"}}
Rows = list[tuple[bytes, bytes | None]]


class Workload:
    """Puts, seals, compactions, checkpoints and retention; every refusal must have a sentence."""

    def __init__(self, found: Machine) -> None:
        self.machine = found
        self.acknowledged: dict[int, tuple[bytes, bytes | None]] = {}
        self.refused: list[bytes] = []  # values that "nothing was appended" was said of
        self.errors: list[BaseException] = []
        self.count = 0

    async def play(self) -> None:
        if not await self.tried(self.machine.start()):
            return
        kit, broker = self.machine.kit, self.machine.broker
        if not await self.tried(broker.create_topic("t", parse_spec(SPEC))):
            return
        for turn in range(3):
            for _ in range(6):
                await self.put(kit)
            await self.tried(self.seal())
            await self.tried(broker.checkpoint())
            await self.put(kit)
            await self.tried(self.compact(kit))
            await self.tried(broker.parts.upkeep.retain())
            await self.tried(asyncio.to_thread(broker.core.key_query.build_missing))
            if turn == 1:
                await self.tried(self.machine.end())
                if not await self.tried(self.machine.start()):
                    return
                kit, broker = self.machine.kit, self.machine.broker

    async def tried(self, work) -> bool:
        """Whether it succeeded; a failure of the disk has an error of ours or the system's own."""
        try:
            await work
            return True
        except (FirnError, OSError) as error:
            self.note(error)
            return False

    def note(self, error: BaseException) -> None:
        assert str(error), "an error without a sentence"
        self.errors.append(error)

    async def put(self, kit: Kit) -> None:
        self.count += 1
        value = b"value %d " % self.count + b"x" * 300
        rows: Rows = [(b"k%d" % (self.count % 5), value), (b"gone", None if self.count % 2 else value)]
        try:
            appended = await kit.put("t", rows)
        except Unavailable as error:
            self.note(error)
            if "nothing was appended" in error.message or isinstance(error, ReadOnly):
                self.refused.append(value)
            await self.machine.broker.parts.upkeep.check_disk()  # as housekeeping does every second
            return
        for row, pair in enumerate(rows):
            self.acknowledged[appended.base_offset + row] = pair

    async def seal(self) -> None:
        broker = self.machine.broker
        broker.parts.sealer.seal(broker.partitions.get(broker.topic("t"), 0))

    async def compact(self, kit: Kit) -> None:
        compaction = await kit.compact("t")
        row = compaction.partitions[0]
        if row.state != "done":
            assert row.reason
            raise OSError(row.reason)

    async def check(self, kit: Kit) -> None:
        """All that was acknowledged and nothing that was refused."""
        if not any(topic.name == "t" for topic in kit.broker.topics()):
            assert not self.acknowledged
            return
        view = await kit.read("t")
        horizon = kit.broker.partitions.get(kit.broker.topic("t"), 0).horizon
        assert not {r.value for r in view} & set(self.refused), "a refused record is there"
        newest = {key: offset for offset, (key, _) in sorted(self.acknowledged.items())}
        there = {r.offset: (r.key, r.value) for r in view}
        for key, offset in newest.items():
            newer = [r for r in view if r.key == key and r.offset > offset]  # sent, and its answer was lost
            if self.acknowledged[offset][1] is not None and not newer and not self.hidden(key, offset):
                assert there.get(offset) == self.acknowledged[offset], (
                    f"{key!r} at {offset}, horizon {horizon}"
                )
        for offset, pair in there.items():
            assert self.acknowledged.get(offset, pair) == pair, "an acknowledged offset changed"

    def hidden(self, key: bytes, offset: int) -> bool:
        """A tombstone without an answer may have been appended after ``offset`` and be compacted away."""
        return key == b"gone" and len(self.errors) > len(self.refused)


async def fail_once(at: int, code: int, kinds: frozenset[str]) -> Workload:
    found = Machine(SEED)
    found.disk.fail(at, code, kinds=kinds)
    work = Workload(found)
    await work.play()
    found.disk.heal()
    if hasattr(found, "kit") and found.broker.core.health.failed is None:
        await work.check(found.kit)
    await found.lose_power()
    kit = await found.start()
    await work.check(kit)
    if any(topic.name == "t" for topic in kit.broker.topics()):
        before = await kit.map("t")
        assert (await kit.compact("t")).partitions[0].state == "done"
        assert await kit.map("t") == before
    await found.end()
    return work


async def operations(kinds: frozenset[str]) -> int:
    found = Machine(SEED)
    work = Workload(found)
    await work.play()
    assert not work.errors
    await work.check(found.kit)
    await found.end()
    return sum(1 for kind, _ in found.disk.operations if kind in kinds)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("kinds", [WRITES, SYNCS], ids=["write", "sync"])
def test_no_failed_operation_loses_what_was_acknowledged_or_shows_what_was_refused(code, kinds):
    count = run(operations(kinds))
    everything = os.environ.get("FIRN_FAULTS") == "all"
    chosen = range(1, count + 1)
    for at in chosen if everything else sorted(random.Random(SEED + code).sample(chosen, SAMPLE)):
        try:
            work = run(fail_once(at, code, kinds))
        except BaseException as error:
            raise AssertionError(
                f"FIRN_SEED={SEED}: operation {at} of {count} failed with {code}: {error!r}"
            ) from error
        if everything and not work.errors:
            print(f"operation {at}: nobody was told")


async def until(holds: Callable[[], object], what: str) -> None:
    """Return in the turn of the event loop in which it comes to hold."""
    end = asyncio.get_running_loop().time() + 60
    while not holds():
        assert asyncio.get_running_loop().time() < end, f"never happened: {what}"
        await asyncio.sleep(0.01)


def broker_row(kit: Kit) -> dict[str, object]:
    row = kit.broker.status()["brokers"][0]
    assert isinstance(row, dict)
    return row


def test_a_full_disk_makes_the_broker_read_only_until_there_is_room_and_compaction_goes_on():
    async def go():
        disk = PowerDisk(1, capacity=1 << 20)
        async with machine(1, disk=disk, disk_reserve=0.25, compaction_check_ms=50) as found:
            kit = found.kit
            await kit.create(**SPEC)

            async def fill():
                for number in range(4000):
                    await kit.put("t", [(b"k%d" % (number % 3), b"x" * 3000)])
                    await found.broker.parts.upkeep.check_disk()  # as housekeeping does every second

            with pytest.raises(ReadOnly, match="read-only"):
                await fill()
            row = broker_row(kit)
            assert row["read_only"]
            assert "diskReserve" in str(row["reason"])
            assert await kit.get("t", b"k1") == b"x" * 3000
            assert (await kit.compact("t")).partitions[0].state == "done"
            await found.broker.checkpoint()
            # Housekeeping: __topics lets go too, the log is cut.
            await until(lambda: not broker_row(kit)["read_only"], "there is room")
            assert broker_row(kit)["reason"] is None
            await kit.put("t", [(b"k1", b"again")])
            assert await kit.map("t") == {b"k0": b"x" * 3000, b"k1": b"again", b"k2": b"x" * 3000}

    run(go())


def test_a_write_without_room_is_refused_with_the_reason_and_taken_once_there_is_room():
    async def go():
        async with machine(2) as found:
            kit, disk = found.kit, found.disk
            await kit.create(**SPEC)
            await kit.put("t", [(b"a", b"1")])
            total = disk.capacity
            disk.capacity = sum(map(len, disk.files().values())) + 200
            with pytest.raises(
                ReadOnly, match="nothing was appended: this broker is read-only: the disk is full"
            ):
                await kit.put("t", [(b"a", b"2" * 1000)])
            row = broker_row(kit)
            assert row["read_only"]
            assert "the disk is full" in str(row["reason"])
            assert await kit.map("t") == {b"a": b"1"}
            disk.capacity = total
            await until(lambda: not broker_row(kit)["read_only"], "the room is seen")
            assert (await kit.put("t", [(b"a", b"3")])).base_offset == 1
            assert await kit.map("t") == {b"a": b"3"}

    run(go())


@pytest.mark.parametrize("flush", ["sync", "interval"])
def test_a_failed_fsync_of_the_log_ends_service_and_a_restart_has_everything_acknowledged(flush):
    async def go():
        found = Machine(3)
        kit = await found.start()
        await kit.create(durability={"flush": "sync"})
        await kit.create("i", durability={"flush": "interval"})
        name = "t" if flush == "sync" else "i"
        await kit.put("t", [(b"a", b"1")])
        found.disk.fail(1, kinds={"sync"}, path_ends=".log")
        if flush == "sync":
            with pytest.raises(Unavailable, match="not acknowledged: fsync failed"):
                await kit.put("t", [(b"a", b"lost")])
        else:
            await kit.put("i", [(b"a", b"lost")])
            with pytest.raises(Unavailable, match="not acknowledged: fsync failed"):
                await kit.get("i", b"a")
        assert not found.broker.is_ready()
        assert "fsync failed" in await asyncio.wait_for(found.broker.failed(), 60)
        assert "fsync failed" in str(broker_row(kit)["reason"])
        for topic in ("t", "i"):
            with pytest.raises(Unavailable, match="stopped serving"):
                await kit.put(topic, [(b"a", b"more")])
        with pytest.raises(Unavailable, match="stopped serving"):
            await kit.get(name, b"a")
        await found.lose_power()
        kit = await found.start()
        assert await kit.get("t", b"a") in (b"1", b"lost")  # what was not acknowledged may be there, or not
        assert await kit.get("i", b"a") in (None, b"lost")
        await kit.put("t", [(b"a", b"2")])
        assert await kit.get("t", b"a") == b"2"
        await found.end()

    run(go())


def test_a_failed_fsync_while_retention_cuts_the_log_ends_service_too():
    async def go():
        found = Machine(4, compaction_check_ms=50)
        kit = await found.start()
        await kit.create(**SPEC)
        for number in range(30):
            await kit.put("t", [(b"a", b"%d" % number * 400)])
        assert (await kit.compact("t")).state == "done"
        # Before there is anything to cut; what else syncs the log is a put, and none is under way.
        found.disk.fail(1, kinds={"sync"}, path_ends=".log")
        await found.broker.checkpoint()
        await asyncio.wait_for(found.broker.failed(), 60)  # housekeeping
        assert not found.broker.is_ready()
        with pytest.raises(Unavailable):
            await kit.put("t", [(b"a", b"more")])
        await found.lose_power()
        kit = await found.start()
        assert await kit.get("t", b"a") == b"29" * 400
        await found.end()

    run(go())


def test_a_failed_index_flush_is_counted_shown_and_tried_again():
    async def go():
        async with machine(5, checkpoint_bytes=1) as found:
            kit = found.kit
            await kit.create(**SPEC)
            found.disk.fail(1, errno.EIO, kinds={"sync"}, path_ends="/CHECKPOINT.tmp")
            await kit.put("t", [(b"a", b"1")])
            metrics = found.broker.metrics
            await until(lambda: metrics["checkpoint_failures"], "the flush failed")
            reason = str(broker_row(kit)["reason"])
            assert "checkpoint" in reason
            assert "Input/output error" in reason
            await kit.put("t", [(b"a", b"2")])
            assert await kit.map("t") == {b"a": b"2"}
            await until(lambda: metrics["checkpoints"], "it was tried again")
            await until(lambda: broker_row(kit)["reason"] is None, "it is well again")
            assert metrics["checkpoint_failures"] == 1

    run(go())


def test_a_failed_seal_is_counted_shown_and_its_rows_stay_found():
    async def go():
        async with machine(6) as found:
            kit = found.kit
            await kit.create(**SPEC)
            await kit.put("t", [(b"a", b"1")])
            found.disk.fail(1, errno.ENOSPC, kinds={"pwrite"}, path_ends=".dirty")
            broker = found.broker
            broker.parts.sealer.seal(broker.partitions.get(broker.topic("t"), 0))
            await until(lambda: broker.metrics["seal_failures"], "the seal failed")
            assert broker.metrics["seal_failures"] == 1
            assert "sealing" in str(broker_row(kit)["reason"])
            assert await kit.get("t", b"a") == b"1"
            assert (await kit.compact("t")).partitions[0].state == "done"
            assert await kit.map("t") == {b"a": b"1"}

    run(go())


def test_a_failed_compaction_keeps_the_old_state_and_says_why():
    async def go():
        async with machine(7) as found:
            kit = found.kit
            await kit.create(**SPEC)
            await kit.create("other", **SPEC)
            for topic in ("t", "other"):
                await kit.put(topic, [(b"a", b"1"), (b"b", None)])
            found.disk.fail(1, errno.ENOSPC, kinds={"pwrite"}, path_ends=".segment")
            row = (await kit.compact("t")).partitions[0]
            assert row.state == "failed"
            assert "No space left" in str(row.reason)
            assert found.broker.metrics["compactions_failed"] == 1
            shown = found.broker.status()["topics"][1]["partitions"][0]["last_compaction"]
            assert (shown["result"], "No space left" in shown["reason"]) == ("failed", True)
            assert await kit.map("t") == {b"a": b"1"}
            assert not broker_row(kit)["read_only"]
            assert (await kit.compact("other")).partitions[0].state == "done"
            assert (await kit.compact("t")).partitions[0].state == "done"

    run(go())

"""The key index of unsealed rows after a start: loaded from the commit log, from runs of batches of all kinds."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from firn.batch import Codec, Codecs
from firn.errors import Corrupt
from firn_node.engine.broker import Broker
from support.engine_kit import Kit, run, running, settings

MANY = 700


async def _filled(kit: Kit) -> dict[bytes, bytes | None]:
    """Small batches and large ones, some compressed, some with tags, beside those of other partitions."""
    model: dict[bytes, bytes | None] = {}
    await kit.create("t", partitions=2)

    async def put(rows: list[tuple[bytes, bytes | None]], **options: Any) -> None:
        await kit.put("t", rows, **options)
        model.update(rows)

    for n in range(MANY):
        await put([(b"key%d" % (n % 300), b"%d" % n if n % 7 else None)])
        if n % 100 == 50:
            await kit.put("t", [(b"elsewhere", b"x")], partition=1)  # ends the run
            await put([(b"many%d" % k, b"%d/%d" % (k, n)) for k in range(n)])
        if n % 200 == 150:
            await put([(b"packed%d" % n, b"p" * 50)], codecs=Codecs(values=Codec.LZ4))
            await put([(b"packed%d" % k, b"q" * 50) for k in range(n)], codecs=Codecs(keys=Codec.ZSTD))
            await put([(b"tagged%d" % n, b"r")], tags=["red"])
    return model


async def _check(kit: Kit, model: dict[bytes, bytes | None]) -> None:
    partition = kit.broker.partitions.get(kit.broker.topic("t"), 0)
    assert partition.active is None, "nobody has asked for it"
    found = kit.broker.parts.lookup.get(partition, list(model))
    assert [row and row.value for row in found] == list(model.values())
    active = partition.active
    assert active is not None
    assert active.end == partition.dispatched_end


def test_after_a_start_each_key_has_its_newest_record(tmp_path: Path) -> None:
    async def main() -> None:
        async with running(tmp_path) as kit:
            model = await _filled(kit)
            bytes_before = kit.broker.partitions.get(kit.broker.topic("t"), 0).active_bytes
        async with running(tmp_path) as kit:
            await _check(kit, model)
            partition = kit.broker.partitions.get(kit.broker.topic("t"), 0)
            assert partition.active_bytes == bytes_before
            assert 0 < partition.active_since_ms <= kit.broker.core.clock.now_ms()

    run(main())


def test_after_a_crash_rows_behind_the_compacted_part_are_found_though_a_run_begins_before_it(
    tmp_path: Path,
) -> None:
    async def main() -> None:
        async with running(tmp_path / "lives") as kit:
            model = await _filled(kit)
            await kit.compact("t")
            horizon = kit.broker.partitions.get(kit.broker.topic("t"), 0).horizon
            assert horizon
            for n in range(20):
                rows: list[tuple[bytes, bytes | None]] = [(b"key%d" % n, b"newer"), (b"gone%d" % n, None)]
                await kit.put("t", rows)
                model.update(rows)
            shutil.copytree(tmp_path / "lives", tmp_path / "crashed")
        async with running(tmp_path / "crashed") as kit:
            partition = kit.broker.partitions.get(kit.broker.topic("t"), 0)
            entry = kit.broker.core.index.find(*partition.key, horizon)
            assert entry is not None
            assert entry.base_offset < horizon, "the replay has joined what was dispatched bit by bit"
            await _check(kit, model)
            assert partition.active is not None
            assert partition.active.start == horizon

    run(main())


@pytest.mark.parametrize("flipped", [b"value 7.", b"key7"])
def test_after_a_start_a_damaged_batch_among_small_ones_is_corrupt_and_named(
    tmp_path: Path, flipped: bytes
) -> None:
    async def main() -> None:
        async with running(tmp_path) as kit:
            await kit.create("t")
            for n in range(9):
                await kit.put("t", [(b"key%d" % n, b"value %d." % n)])
            await kit.broker.checkpoint()
        (file,) = [f for f in tmp_path.rglob("*.log") if flipped in f.read_bytes()]
        raw = bytearray(file.read_bytes())
        raw[raw.index(flipped)] ^= 1
        file.write_bytes(raw)
        kit = Kit(Broker(settings(tmp_path)))
        await kit.broker.start()
        try:
            with pytest.raises(Corrupt, match="commit log at byte"):
                await kit.broker.get("t", [b"key1"])
        finally:
            await kit.broker.stop()

    run(main())

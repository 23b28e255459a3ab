"""Numbers that must not cost: 100,000 partitions and a million light queues on one broker."""

import asyncio
import os
import time

from engine_kit import Kit, run, settings

from firn_node.engine.api import ReadRequest, outcomes_or_raise
from firn_node.engine.broker import Broker

PARTITIONS = 100_000
QUEUES = 1_000_000
# Bounds against growth with the number of partitions, far above what is measured; docs/benchmarks.md has the times.
START_SECONDS = 5.0
OPEN_FILES_MAX = 1000


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_a_hundred_thousand_partitions_open_few_files_and_start_at_once(tmp_path):
    async def fill() -> None:
        kit = Kit(Broker(settings(tmp_path)))
        await kit.broker.start()
        await kit.create(partitions=PARTITIONS)
        for first in range(0, PARTITIONS, 2000):
            data = b"".join(
                kit.batch("t", [(b"key", b"value of %d" % p)], partition=p)
                for p in range(first, first + 2000)
            )
            outcomes_or_raise(await kit.broker.produce(data))
        assert open_files() < OPEN_FILES_MAX
        await kit.broker.stop()

    async def look() -> None:
        began = time.perf_counter()
        kit = Kit(Broker(settings(tmp_path)))
        await kit.broker.start()
        took = time.perf_counter() - began
        assert await kit.get("t", b"absent") is None
        for p in (0, 1, 49_999, PARTITIONS - 1):
            found = await kit.broker.get("t", [b"key"], partition=p)
            assert found[0] is not None
            assert found[0].value == b"value of %d" % p
            assert len(await kit.read("t", partition=p)) == 1
        assert open_files() < OPEN_FILES_MAX
        assert took < START_SECONDS, f"a clean start took {took:.1f} s"
        await kit.broker.stop()

    run(fill(), 300)
    run(look())


def test_a_million_light_queues_need_no_declaration_and_no_file(tmp_path):
    async def go() -> None:
        kit = Kit(Broker(settings(tmp_path)))
        await kit.broker.start()
        await kit.create()
        files = open_files()
        per_batch, names = 1000, 50
        for first in range(0, QUEUES, per_batch * names):
            rows = [(b"k%d" % i, b"v") for i in range(per_batch)]
            queues = [[f"q{first + i * names + j}" for j in range(names)] for i in range(per_batch)]
            await kit.put("t", rows, queues=queues)
        await kit.put("t", [(b"again", b"v")], queues=[["q777777"]])
        for name, offsets in (("q0", [0]), ("q777777", [0, 1]), (f"q{QUEUES - 1}", [0])):
            result = await kit.broker.read(ReadRequest(topic="t", partition=0, view="raw", queue=name))
            assert [offset for rows in result.queue_rows or [] for offset, _ in rows] == offsets
        assert open_files() <= files + 64
        await kit.broker.stop()

    run(go(), 300)


def test_topics_are_listed_in_pages(tmp_path):
    async def go() -> None:
        kit = Kit(Broker(settings(tmp_path)))
        await kit.broker.start()
        names = [f"t{i:04d}" for i in range(250)]
        await asyncio.gather(*(kit.create(name) for name in names))
        found: list[str] = []
        while page := kit.broker.topics(after=found[-1] if found else "", limit=100):
            found += [topic.name for topic in page]
        assert found == names
        await kit.broker.stop()

    run(go())

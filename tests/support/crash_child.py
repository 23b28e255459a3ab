"""A broker process that works until it is killed.

It plays a fixed workload from operation START on and prints one line per *acknowledged* operation, at once, so that
whoever kills it (a fail point, a signal) knows what must be there afterwards. ``operation(n)`` says what the n-th
one writes; both sides use it.
"""

import asyncio
import contextlib
import multiprocessing
import os
import signal
from multiprocessing.connection import Connection
from pathlib import Path

from engine_kit import Kit, settings
from plan_kit import compact_by_plan, open_plan

from firn.batch import Codecs
from firn.errors import TopicExists, UnknownTopic
from firn_node import failpoints
from firn_node.engine.broker import Broker

OPERATIONS = 60
KEYS = 9


def operation(n: int) -> list[tuple[bytes, bytes | None]]:
    """The records of the n-th operation: a few keys overwritten, one deleted now and then."""
    rows: list[tuple[bytes, bytes | None]] = [
        (b"key%d" % ((n * 7 + i) % KEYS), b"%d.%d " % (n, i) * 150) for i in range(4)
    ]
    if n % 5 == 4:
        rows.append((b"key%d" % (n % KEYS), None))
    return rows


def model(operations: int) -> dict[bytes, bytes]:
    """The map after that many operations."""
    found: dict[bytes, bytes] = {}
    for n in range(operations):
        for key, value in operation(n):
            if value is None:
                found.pop(key, None)
            else:
                found[key] = value
    return found


async def work(folder: str, start: int, index: str) -> None:
    kit = Kit(Broker(settings(folder, log_segment_bytes=16 << 10, index=index)))
    await kit.broker.start()
    try:
        await kit.create(
            compaction={"deleteRetention": "0s", "segmentBytes": "8Ki", "memory": "64Ki"},
            retention={"time": "0s"},
        )
    except TopicExists:
        pass
    for n in range(start, OPERATIONS):
        codec = n % 3
        await kit.put("t", operation(n), codecs=Codecs(codec, codec, codec), producer=(7, start, n - start))
        os.write(1, b"%d\n" % n)
        if n % 8 == 3:
            await kit.broker.checkpoint()
        if n % 6 == 5:
            await kit.compact("t", force=n % 12 == 5)
        if n % 9 == 7:
            await compact_by_plan(kit, slice_records=8)
        if n % 27 == 13:
            plan = await open_plan(kit)
            await kit.broker.cancel_plan("t", plan["id"])
        if n % 10 == 9:
            await kit.broker.parts.upkeep.retain()
            await asyncio.to_thread(kit.broker.core.key_query.build_missing, 1)
        if n % 15 == 14:
            with contextlib.suppress(TopicExists, UnknownTopic):  # done before the kill already
                await kit.broker.delete_topic("other") if n % 30 == 29 else await kit.create("other")
    await kit.broker.stop()
    os.write(1, b"end\n")


def enter(write_end: Connection, failpoint: str, folder: str, start: int, index: str) -> None:
    """The child's main: work until the fail point ``NAME:N`` is reached for the N-th time."""
    os.dup2(write_end.fileno(), 1)
    name, _, nth = failpoint.partition(":")
    left = int(nth or 1)

    def kill(step: str) -> None:
        nonlocal left
        left -= step == name
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    failpoints.hook = kill
    asyncio.run(work(folder, start, index))


def play(
    folder: str | Path, start: int, *, failpoint: str = "", index: str = "rocksdb"
) -> tuple[int, list[bytes]]:
    """Run a child to its end; its exit code (negative: the signal) and the lines that it printed.

    Children are forked from a server that has imported everything and opened nothing: an import takes a second.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["crash_child"])
    read_end, write_end = context.Pipe(duplex=False)
    process = context.Process(target=enter, args=(write_end, failpoint, str(folder), start, index))
    process.start()
    write_end.close()
    with open(os.dup(read_end.fileno()), "rb") as lines:
        printed = lines.read().split()
    process.join(60)
    read_end.close()
    code = process.exitcode
    process.close()
    if code not in (0, -signal.SIGKILL):
        raise AssertionError(f"{failpoint}: the child ended with {code}")
    return code, printed

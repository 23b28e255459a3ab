"""A broker process that works until it is killed: ``python crash_child.py FOLDER START [INDEX]``.

It plays a fixed workload from operation START on and prints one line per *acknowledged* operation, at once, so that
whoever kills it (a fail point, a signal) knows what must be there afterwards. ``operation(n)`` says what the n-th
one writes; both sides use it.
"""

import asyncio
import os
import sys

from engine_kit import Kit, settings
from firn.batch import Codecs
from firn.errors import TopicExists
from firn_node.engine.broker import Broker

OPERATIONS = 60
KEYS = 9


def operation(n: int) -> list[tuple[bytes, bytes | None]]:
    """The records of the n-th operation: a few keys overwritten, one deleted now and then."""
    rows: list[tuple[bytes, bytes | None]] = [(b"key%d" % ((n * 7 + i) % KEYS), b"%d.%d " % (n, i) * 40) for i in range(4)]
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
        if n % 10 == 9:
            await kit.broker._retain()
            await asyncio.to_thread(kit.broker.core.key_query.build_missing, 1)
        if n % 15 == 14:
            await kit.broker.delete_topic("other") if n % 30 == 29 else await kit.create("other")
    await kit.broker.stop()
    os.write(1, b"end\n")


if __name__ == "__main__":
    asyncio.run(work(sys.argv[1], int(sys.argv[2]), sys.argv[3] if len(sys.argv) > 3 else "rocksdb"))

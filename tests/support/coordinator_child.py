"""A process that renews a record for ever: prints ``ASKED version`` before each swap, ``DONE version`` after it."""

import asyncio
import os
import sys

from coordinator_kit import GROUP, renewed

from firn_node.coordinator import Done, Found, SqliteCoordinator


def say(line: str) -> None:
    """One write, so that no end of this process splits the line."""
    os.write(1, line.encode())


async def count(path: str) -> None:
    coordinator = SqliteCoordinator(path, busy_s=20.0, answer_s=30.0)
    while True:
        found = await coordinator.read(GROUP)
        assert isinstance(found, Found), found
        version = found.record.version
        say(f"ASKED {version + 1}\n")
        swap = await coordinator.compare_and_set(renewed(found.record), expected_version=version)
        if isinstance(swap, Done):
            say(f"DONE {version + 1}\n")


if __name__ == "__main__":
    asyncio.run(count(sys.argv[1]))

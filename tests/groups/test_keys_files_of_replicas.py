"""Keys files in a group: made of what dispatch has seen, on whoever has the log; nothing is read and hashed again."""

from pathlib import Path
from typing import Any

import pytest
from engine_kit import run
from group_kit import Replica, broker_group

from firn_node.log import keyquery


def whole(replica: Replica) -> bool:
    """Three segments are sealed, and all that are have their keys files."""
    core = replica.broker.core
    return len(core.log.extents()) > 3 and core.key_query.missing() == []


def test_no_replica_reads_a_segment_again_for_its_keys_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The master's first segment begins with its epoch start, which it did not append as a request."""

    def read_again(*_: Any, **__: Any) -> None:
        raise AssertionError("the segment was read again")

    async def story() -> None:
        async with broker_group(tmp_path, 2, log_segment_bytes=64 << 10) as group:
            master = await group.until_master()
            topic_id = await master.kit.create()
            for number in range(40):
                await master.kit.put("t", [(b"key-%d" % number, bytes(8 << 10))])
            await group.until(lambda: all(map(whole, group.replicas)), "all keys files are there", 90)
            for replica in group.replicas:
                key = b"key-%d" % 7
                found = list(replica.broker.core.key_query.find(topic_id, key, 0, 1 << 62))
                assert len(found) == 1

    monkeypatch.setattr(keyquery, "inspect_group", read_again)
    run(story())

"""Message ids: told by readers of the raw view that ask for them, resolved as long as the record is retained."""

from collections.abc import Callable
from typing import Any

import pytest
from engine_kit import run, settings

from firn.client import Client
from firn.errors import Invalid
from firn_node.engine.broker import Broker
from firn_node.server import serve


async def with_client(folder: Any, work: Callable[[Client], Any]) -> None:
    broker = Broker(settings(folder, log_segment_bytes=16 << 10))
    await broker.start()
    server = await serve(broker, host="127.0.0.1", port=0)
    try:
        async with Client(server.address) as client:
            await work(client)
    finally:
        await server.stop()
        await broker.stop()


def test_every_id_that_a_raw_reader_is_told_finds_its_record(tmp_path):
    async def work(client: Client) -> None:
        await client.create_topic("t", partitions=2)
        await client.create_topic("u")
        for i in range(60):
            producer = client.producer("t")
            await producer.send_many(
                [b"k%d" % (j % 7) for j in range(10)], [b"%d.%d" % (i, j) * 20 for j in range(10)]
            )
            await producer.close()
        records = [r async for r in client.reader("t", view="raw", until_end=True, ids=True, page_bytes=3000)]
        assert len(records) == 600
        assert len({r.id for r in records}) == 600
        for record in records[::37]:
            assert record.id is not None
            assert await client.find("t", record.id) == record
            assert await client.find("u", record.id) is None
        assert await client.find("t", "0-7fffffff8-0-1000") is None
        with pytest.raises(Invalid):
            await client.find("t", "nonsense")
        plain = [r async for r in client.reader("t", view="raw", until_end=True)]
        assert [r.id for r in plain] == [None] * 600
        history = await client.query("t", b"k3")
        assert {r.id for r in history} == {r.id for r in records if r.key == b"k3"}

    run(with_client(tmp_path, work))

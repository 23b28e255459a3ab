"""The steps of the demo, each through the client library, each checked against the source."""

import asyncio
import json
import time
from collections import deque
from typing import Any

from firn.client import Client
from firn.errors import FirnError
from firn_node.demo.flights import Flights, expected
from firn_node.demo.process import BrokerProcess
from firn_node.demo.report import Report, say

PARTITIONS = 4
CHUNK = 4_000  # records handed over at a time
CHUNKS_AHEAD = 8
POLL_SECONDS = 0.01
KILL_AT = 0.4  # share of the second load that is acknowledged when the broker is killed

Acknowledged = list[tuple[int, int, int]]  # (row of the source, partition, offset)


def _progress() -> Any:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        transient=False,
    )


async def first_load(address: str, topic: str, flights: Flights, report: Report) -> None:
    """All flights in order of time, then a tombstone for each plane whose last flight was cancelled."""
    async with Client(address) as client:
        await client.create_topic(topic, partitions=PARTITIONS)
        producer = client.producer(topic)
        began = time.perf_counter()
        with _progress() as progress:
            bar = progress.add_task("produce", total=len(flights))
            waiting: deque[tuple[int, Any]] = deque()
            for start in range(0, len(flights), CHUNK):
                waiting.append(await _send(producer, flights, start))
                while len(waiting) > CHUNKS_AHEAD:
                    await _settle(waiting, progress, bar)
            while waiting:
                await _settle(waiting, progress, bar)
        last_ms = flights.timestamps[-1]
        await (await producer.send_many(flights.grounded, [None] * len(flights.grounded), timestamps=last_ms))
        await producer.flush()
        report.produce_seconds = time.perf_counter() - began
    report.tombstones = len(flights.grounded)
    report.records_in = len(flights) + report.tombstones
    rate = report.records_in / report.produce_seconds
    say(
        f"produced {report.records_in:,} records in {report.produce_seconds:.2f} s ({rate:,.0f}/s), all acknowledged"
    )
    say(f"of them {report.tombstones:,} tombstones, for planes whose last flight was cancelled")


async def _send(producer: Any, flights: Flights, start: int) -> tuple[int, Any]:
    rows = slice(start, start + CHUNK)
    keys = flights.keys[rows]
    sent = await producer.send_many(keys, flights.values[rows], timestamps=flights.timestamps[rows])
    return len(keys), sent


async def _settle(waiting: "deque[tuple[int, Any]]", progress: Any, bar: Any) -> None:
    count, sent = waiting.popleft()
    await sent
    progress.advance(bar, count)


async def run_compaction(address: str, topic: str, report: Report) -> None:
    """Force a compaction and wait for its end."""
    async with Client(address) as client:
        began = time.perf_counter()
        run = await client.compact(topic, force=True)
        while run["state"] in ("waiting", "running"):
            await asyncio.sleep(POLL_SECONDS)
            run = await client.compaction(topic) or run
        report.compaction_seconds = time.perf_counter() - began
    for p in run["partitions"]:
        report.expect(
            p["state"] == "done", f"compaction of partition {p['partition']}: {p['state']}: {p.get('reason')}"
        )
        report.bytes_before += p["bytes_before"]
        report.bytes_after += p["bytes_after"]
        report.records_compacted += p["records_before"]
    say(
        f"compacted {report.records_compacted:,} records in {report.compaction_seconds:.3f} s: "
        f"{report.bytes_before:,} bytes before, {report.bytes_after:,} after"
    )


async def check_view(
    address: str, topic: str, flights: Flights, report: Report, *, after_crash: bool = False
) -> None:
    """Read the compacted view to its end and compare it row by row with what pandas finds.

    After the crash the view holds a part of the second load too; then each plane's row must be a flight of that
    plane, and no plane may be missing that the first load left.
    """
    found: dict[bytes, Any] = {}
    rows = 0
    async with Client(address) as client:
        async for record in client.reader(topic, view="compacted", until_end=True):
            rows += 1
            found[record.key] = record
    wanted = expected(flights)
    if after_crash:
        known = set(flights.keys)
        for plane in wanted:
            report.expect(plane.encode() in found, f"{plane} is missing after the crash")
        for key in found:
            report.expect(key in known, f"{key!r} came from nowhere")
        say(f"compacted view after the crash: all {len(wanted):,} live planes are there")
        return
    live = {key: record for key, record in found.items() if record.value is not None}
    report.live = len(live)
    report.expect(rows == len(found), f"{rows} rows for {len(found)} keys: a key was served twice")
    for plane, (ms, row) in wanted.items():
        served = live.get(plane.encode())
        report.expect(
            served is not None and served.timestamp == ms and json.loads(served.value) == row,
            f"{plane}: expected {ms} {row}, found {served}",
        )
    report.expect(len(live) == len(wanted), f"{len(live)} live planes, pandas finds {len(wanted)}")
    dead = {key for key, record in found.items() if record.value is None}
    report.expect(dead == set(flights.grounded), "the tombstones are not those of the grounded planes")
    say(f"compacted view: {rows:,} rows, {len(live):,} live planes, compared row by row with pandas")


async def query_one_plane(address: str, topic: str, flights: Flights, report: Report) -> None:
    """One plane's history by key and time: the busiest plane's July, against the source."""
    plane = str(flights.frame["tailnum"].value_counts().index[0])
    since, until = 1_372_636_800_000, 1_375_315_200_000  # 2013-07-01 and 2013-08-01, UTC
    of_plane = flights.frame[flights.frame["tailnum"] == plane]
    chosen = of_plane[(of_plane["ms"] >= since) & (of_plane["ms"] < until)].index.tolist()
    async with Client(address) as client:
        began = time.perf_counter()
        records = await client.query(topic, plane.encode(), since=since, until=until)
        seconds = time.perf_counter() - began
    report.expect(
        len(records) == len(chosen), f"query {plane}: {len(records)} records, the source has {len(chosen)}"
    )
    for record, row in zip(records, chosen, strict=False):
        report.expect(
            (record.timestamp, record.value) == (flights.timestamps[row], flights.values[row]),
            f"query {plane}: offset {record.offset} differs from row {row} of the source",
        )
    say(f"query: plane {plane} flew {len(records)} times in July 2013, found in {seconds * 1000:.1f} ms")


async def second_load(broker: BrokerProcess, topic: str, flights: Flights, report: Report) -> Acknowledged:
    """Load the flights once more and kill the broker in the middle. What was acknowledged by then."""
    found: Acknowledged = []
    client = Client(broker.address, timeout=2)
    producer = client.producer(topic)
    waiting: deque[tuple[int, Any]] = deque()
    for start in range(0, len(flights), CHUNK):
        waiting.append((start, (await _send(producer, flights, start))[1]))
        if len(waiting) > CHUNKS_AHEAD:
            first, sent = waiting.popleft()
            _note(found, first, await sent)
        if len(found) >= KILL_AT * len(flights):
            broker.kill()
            break
    under_way = len(waiting)
    await producer.abort()  # what was not acknowledged fails now
    for start, sent in waiting:
        try:
            _note(found, start, await sent)
        except FirnError:
            continue
    await client.close()
    report.expect(len(found) < len(flights), "the second load ended before the broker was killed")
    report.acknowledged_at_kill = len(found)
    say(
        f"second load: killed the broker (SIGKILL) with {len(found):,} records acknowledged and {under_way} chunks under way"
    )
    return found


def _note(found: Acknowledged, start: int, outcome: Any) -> None:
    partitions, offsets = outcome
    found += zip(range(start, start + len(offsets)), partitions.tolist(), offsets.tolist(), strict=True)


async def check_recovery(
    address: str, topic: str, flights: Flights, acknowledged: Acknowledged, report: Report
) -> None:
    """Every acknowledged record of the second load is at its partition and offset, with its bytes."""
    wanted = {(partition, offset): row for row, partition, offset in acknowledged}
    async with Client(address) as client:
        async for record in client.reader(topic, view="raw", until_end=True):
            row = wanted.pop((record.partition, record.offset), None)
            if row is not None:
                report.expect(
                    (record.key, record.value, record.timestamp)
                    == (flights.keys[row], flights.values[row], flights.timestamps[row]),
                    f"partition {record.partition} offset {record.offset} is not row {row} of the source",
                )
    for (partition, offset), row in wanted.items():
        report.expect(False, f"acknowledged row {row} is missing at partition {partition} offset {offset}")
    say(
        f"recovery: {len(acknowledged) - len(wanted):,} of {len(acknowledged):,} acknowledged records are there"
    )

"""The flights, produced while the master dies; and what is left of them, against the source.

The first flight is written as soon as somebody takes it: from ``kubectl apply`` to its acknowledgement a topic is waited
for. Then a second client writes a heartbeat all the time, one record after another. The gap is the longest time in which
nobody's write was acknowledged.
"""

import asyncio
import json
import time
from collections import deque
from typing import Any

from demo_cluster.place import MADE_S, TOPIC, Place
from demo_cluster.report import Report

from firn.client import Client
from firn.errors import FirnError, UnknownTopic
from firn_node.demo.flights import Flights, expected
from firn_node.demo.report import say

CHUNK = 4_000
CHUNKS_AHEAD = 8
KILL_AT = 0.4  # share of the flights that is acknowledged when the master dies
HEARTBEAT = "heartbeat"
POLL_S = 0.05


class Load:
    def __init__(self, place: Place, flights: Flights, report: Report) -> None:
        self._place = place
        self._flights = flights
        self._report = report
        self._acknowledged: list[tuple[int, int, int]] = []  # row of the source, partition, offset
        self._last: float | None = None  # when a write was acknowledged

    async def run(self) -> None:
        await self._write_first()
        async with self._place.client() as client:
            await client.create_topic(HEARTBEAT)
            stop = asyncio.Event()
            heartbeat = asyncio.create_task(self._beat(stop))
            try:
                await self._produce(client)
            finally:
                stop.set()
                await heartbeat
            self._report.whole_seconds = await asyncio.to_thread(self._place.wait_whole)
            say(
                f"all three replicas are in sync again {self._report.whole_seconds:.1f} s after the last record"
            )
            await self._check_raw(client)
            await self._check_compacted(client)

    async def _write_first(self) -> None:
        """The first flight, by a client that is there before the brokers are; then the topic says that it is ready."""
        flights, report = self._flights, self._report
        row = flights.keys[0], flights.values[0]
        async with asyncio.timeout(MADE_S), self._place.client(timeout=MADE_S) as client:
            while not self._acknowledged:
                try:
                    place = await client.put(TOPIC, *row, timestamp=flights.timestamps[0])
                except UnknownTopic:
                    await asyncio.sleep(POLL_S)
                else:
                    self._acknowledged.append((0, *place))
        report.first_write_seconds = time.perf_counter() - report.applied_at
        await asyncio.to_thread(self._place.wait_ready)
        report.ready_seconds = time.perf_counter() - report.applied_at
        say(f"the first write is acknowledged {report.first_write_seconds:.1f} s after that")

    async def _beat(self, stop: asyncio.Event) -> None:
        """Write until told to stop."""
        async with self._place.client() as client:
            while not stop.is_set():
                await client.put(HEARTBEAT, b"beat", b"%d" % self._report.beats)
                self._report.beats += 1
                self._note_acknowledged()

    def _note_acknowledged(self) -> None:
        now = time.perf_counter()
        if self._last is not None:
            self._report.gap_seconds = max(self._report.gap_seconds, now - self._last)
        self._last = now

    async def _produce(self, client: Client) -> None:
        """All other flights in order of time, then a tombstone for each plane whose last flight was cancelled."""
        flights, report = self._flights, self._report
        producer = client.producer(TOPIC, linger_ms=5)
        began, waiting, is_killed = time.perf_counter(), deque[tuple[int, Any]](), False
        for start in range(1, len(flights), CHUNK):
            rows = slice(start, start + CHUNK)
            sent = await producer.send_many(
                flights.keys[rows], flights.values[rows], timestamps=flights.timestamps[rows]
            )
            waiting.append((start, sent))
            while len(waiting) > CHUNKS_AHEAD:
                await self._settle(*waiting.popleft())
            if not is_killed and len(self._acknowledged) >= KILL_AT * len(flights):
                is_killed = True
                report.killed = await asyncio.to_thread(self._place.master)
                await asyncio.to_thread(self._place.kill, report.killed)
                report.acknowledged_at_kill = len(self._acknowledged)
                say(
                    f"killed {report.killed}, the master, with {len(self._acknowledged):,} records acknowledged"
                )
        while waiting:
            await self._settle(*waiting.popleft())
        last = flights.timestamps[-1]
        await (await producer.send_many(flights.grounded, [None] * len(flights.grounded), timestamps=last))
        await producer.flush()
        report.produce_seconds = time.perf_counter() - began
        report.records = len(flights) + len(flights.grounded)
        report.master_after = await asyncio.to_thread(self._place.master)
        report.expect(
            report.master_after != report.killed, "the killed pod is master again: nobody took over"
        )
        say(
            f"produced {report.records:,} records in {report.produce_seconds:.1f} s, all acknowledged; "
            f"the master is {report.master_after}"
        )

    async def _settle(self, start: int, sent: Any) -> None:
        partitions, offsets = await sent
        self._note_acknowledged()
        rows = range(start, start + len(offsets))
        self._acknowledged += zip(rows, partitions.tolist(), offsets.tolist(), strict=True)

    async def _check_raw(self, client: Client) -> None:
        """Every acknowledged record is at its place with its bytes, and there are no others."""
        flights, report = self._flights, self._report
        wanted = {(partition, offset): row for row, partition, offset in self._acknowledged}
        found = 0
        async for record in client.reader(TOPIC, view="raw", until_end=True):
            found += 1
            row = wanted.pop((record.partition, record.offset), None)
            if row is not None:
                report.expect(
                    (record.key, record.value) == (flights.keys[row], flights.values[row]),
                    f"partition {record.partition} offset {record.offset} is not row {row} of the source",
                )
        report.lost = len(wanted)
        report.doubled = found - (report.records - report.lost)
        report.expect(report.lost == 0, f"{report.lost} acknowledged records are missing")
        report.expect(report.doubled == 0, f"{report.doubled} records too many in the log")
        say(
            f"{len(self._acknowledged) - report.lost:,} of {len(self._acknowledged):,} acknowledged flights are there"
        )

    async def _check_compacted(self, client: Client) -> None:
        """The compacted view against what pandas finds."""
        report = self._report
        run = await client.compact(TOPIC, force=True)
        while run["state"] in ("waiting", "running"):
            await asyncio.sleep(POLL_S)
            try:
                run = await client.compaction(TOPIC) or run
            except FirnError as error:
                if not error.retry:
                    raise
        for part in run["partitions"]:
            report.expect(
                part["state"] == "done", f"compaction of partition {part['partition']}: {part['state']}"
            )
        live: dict[str, Any] = {}
        async for record in client.reader(TOPIC, view="compacted", until_end=True):
            if record.value is not None:
                live[record.key.decode()] = record
        wanted = expected(self._flights)
        report.expect(set(live) == set(wanted), f"{len(live)} live planes, pandas finds {len(wanted)}")
        for plane in set(live) & set(wanted):
            ms, row = wanted[plane]
            report.expect(
                live[plane].timestamp == ms and json.loads(live[plane].value) == row,
                f"{plane}: expected {row}, found {live[plane]}",
            )
        report.live = len(live)
        say(f"compacted view: {len(live):,} live planes, compared row by row with pandas")

"""Single writes, and compare-and-set: one record, one batch, one answer.

A write goes under a *name* (producer id and sequence), so that repeating it after a broken connection gets its
first outcome. A name has one write under way at a time, and is used again after a success only: whether a refused
write has used up its sequence then never matters, and a lost compare-and-set cannot be taken for another write's.

Invariants: a write is repeated byte for byte or not at all; writes that run at the same time are not ordered.
"""

import asyncio
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random

from firn.batch import Buffer, Identity, columns_of, encode
from firn.client.chunks import fault_of
from firn.client.producer import wall_ms
from firn.client.routes import Target
from firn.client.stream import expect
from firn.client.transport import Transport
from firn.errors import FirnError, InvariantBroken, SequenceGap, from_document
from firn.partitioner import partition_of
from firn.wire import Op

# A broker forgets producers after 7 days: a name that rested for an hour is replaced long before that.
NAME_REST_S = 3600.0
NAMES_KEPT = 64  # per partition: as many writes at the same time find a name ready


@dataclass(frozen=True, slots=True, kw_only=True)
class Put:
    """One write; ``value`` None deletes."""

    key: Buffer
    value: Buffer | None
    if_offset: int | None = None
    tag: str | None = None
    timestamp: int | None = None
    headers: Mapping[str, str] | None = None
    queues: Sequence[str] | None = None
    partition: int | None = None


@dataclass(slots=True)
class _Name:
    producer_id: int
    sequence: int
    rested_since: float


class Puts:
    """The names of one client."""

    def __init__(self, randomness: Random) -> None:
        self._randomness = randomness
        self._names: defaultdict[tuple[int, int], list[_Name]] = defaultdict(list)

    async def put(self, put: Put, target: Target, *, timeout: float) -> tuple[int, int]:
        """Partition and offset of the record, once it is acknowledged.

        Errors: Conflict when ``if_offset`` is not the newest offset; Timeout when the outcome is unknown.
        """
        row = (put.key, put.value, put.tag, put.timestamp, put.headers, put.queues, put.partition)
        if (error := fault_of(row, target.partitions, "record")) is not None:
            raise error
        key = bytes(put.key)
        partition = partition_of(key, target.partitions) if put.partition is None else put.partition
        place = (target.topic_id, partition)
        transport = target.transport_of(partition)
        name = self._take_name(place)
        try:
            offset = await self._write(put, key, place, name, transport, timeout)
        except SequenceGap:
            if name.sequence == 0:
                raise
            # Refused before anything of it was written: the broker no longer knows the name. Take a fresh one.
            name = self._fresh_name()
            offset = await self._write(put, key, place, name, transport, timeout)
        name.sequence += 1
        name.rested_since = asyncio.get_running_loop().time()
        if len(self._names[place]) < NAMES_KEPT:
            self._names[place].append(name)
        return partition, offset

    async def _write(
        self, put: Put, key: bytes, place: tuple[int, int], name: _Name, transport: Transport, timeout: float
    ) -> int:
        columns = columns_of(
            [key], [None if put.value is None else bytes(put.value)],
            wall_ms() if put.timestamp is None else put.timestamp,
            tags=None if put.tag is None else [put.tag],
            headers=None if put.headers is None else [put.headers],
            queues=None if put.queues is None else [put.queues],
        )  # fmt: skip
        identity = Identity(
            topic_id=place[0], partition=place[1], producer_id=name.producer_id, sequence=name.sequence
        )
        data = encode(columns, identity)
        meta = {} if put.if_offset is None else {"if_offset": [put.if_offset]}
        may_be_written = False

        async def attempt() -> int:
            nonlocal may_be_written
            stream = await transport.stream()
            try:
                answer = await stream.ask(Op.PRODUCE, meta, data)
            except FirnError:
                may_be_written = True
                raise
            results = expect(answer, Op.ACK).meta.get("results")
            if not isinstance(results, list) or len(results) != 1:
                raise InvariantBroken(f"the broker acknowledged one batch with {results!r}")
            if isinstance(results[0], dict):
                raise from_document(results[0])
            return int(results[0][1])

        try:
            return await transport.retried(attempt, what="put", timeout=timeout)
        except SequenceGap as gap:
            if may_be_written:
                raise FirnError(f"put: whether it was written is unknown: {gap.message}") from gap
            raise

    def _take_name(self, place: tuple[int, int]) -> _Name:
        rested, now = self._names[place], asyncio.get_running_loop().time()
        while rested:
            name = rested.pop()
            if now - name.rested_since < NAME_REST_S:
                return name
        return self._fresh_name()

    def _fresh_name(self) -> _Name:
        return _Name(self._randomness.randrange(1, 1 << 64), 0, 0.0)

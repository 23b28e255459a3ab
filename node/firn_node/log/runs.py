"""Which batches of an append go to which segment, and what they add to its topics: a pure plan."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from firn.batch import HEADER_BYTES, Buffer
from firn.errors import InvariantBroken, MalformedBatch
from firn_node.log.epochs import epoch_starts_of
from firn_node.log.recovery import Check
from firn_node.log.segment import Topics
from firn_node.log.walk import TopicBytes, add_topics, announced_size, headers

Row = tuple[int, int, int]  # topic_id, bytes, newest append time


@dataclass(frozen=True, slots=True)
class Run:
    """What goes to the segment at ``start``, one byte after another."""

    start: int
    parts: list[Buffer] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)

    def add_to(self, topics: Topics) -> None:
        """Count it among the topics of its segment."""
        for row in self.rows:
            count_batch(topics, *row)


def count_batch(topics: Topics, topic_id: int, size: int, append_ms: int) -> None:
    """Count bytes of a topic among the topics of a segment."""
    before = topics.get(topic_id)
    if before is not None:
        size, append_ms = size + before.bytes, max(append_ms, before.newest_append_ms)
    topics[topic_id] = TopicBytes(size, append_ms)


@dataclass(frozen=True, slots=True)
class Plan:
    runs: list[Run]
    end: int  # of the log, once all is written
    append_ms: int  # the newest
    epochs: tuple[tuple[int, int], ...] = ()  # that begin in a copy: (epoch, position)


def plan_batches(
    batches: Sequence[Buffer], positions: Sequence[int], *, segment_start: int, segment_bytes: int
) -> Plan:
    """The runs of single batches; a segment that is full gets no more, unless it is empty.

    *Errors*: InvariantBroken for bytes that are no batch: the appender checks before it comes here.
    """
    runs = [Run(segment_start)]
    newest = 0
    for position, batch in zip(positions, batches, strict=True):
        start = runs[-1].start
        if position + len(batch) - start > segment_bytes and position > start:
            runs.append(Run(position))
        row = _row_of(batch)
        runs[-1].parts.append(batch)
        runs[-1].rows.append(row)
        newest = max(newest, row[2])
    return Plan([run for run in runs if run.parts], positions[-1] + len(batches[-1]), newest)


def plan_copy(
    data: Buffer, position: int, *, after: int, segment_start: int, segment_bytes: int, check: Check
) -> Plan:
    """The runs of whole batches that lie one after another in ``data``, as another replica's log has them.

    A step per segment, not per batch. ``after``: the epoch of what lies before.
    *Errors*: MalformedBatch unless all of it is whole, sound batches; Corrupt for epochs that go back.
    """
    good, fault = check(data)
    if good != len(data) or not good:
        raise MalformedBatch(
            f"position {position + good}: {fault or f'{len(data) - good} bytes, not a whole batch'}"
        )
    found, view = headers(data), memoryview(data)
    starts, ends = found.starts + position, found.starts + found.sizes + position
    epochs = epoch_starts_of(found, data, position, after=after)
    runs, first, start = [], 0, segment_start
    while first < len(starts):
        limit = int(np.searchsorted(ends, start + segment_bytes, "right"))
        if limit <= first and starts[first] > start:
            start = int(starts[first])
            continue
        limit = max(limit, first + 1)  # a batch larger than a segment is alone in one
        topics: Topics = {}
        add_topics(topics, found.rows(first, limit))
        part = view[int(starts[first]) - position : int(ends[limit - 1]) - position]
        runs.append(Run(start, [part], [(topic_id, *counted) for topic_id, counted in topics.items()]))
        first = limit
    return Plan(runs, position + len(data), int(found.append_ms.max()), tuple(epochs))


def _row_of(batch: Buffer) -> Row:
    head = bytes(batch[:HEADER_BYTES])
    if announced_size(head) != len(batch):
        raise InvariantBroken(f"commit log: {len(batch)} bytes to append are not one whole batch")
    stamp = int.from_bytes(head[96:104], "little", signed=True)
    return int.from_bytes(head[32:40], "little"), len(batch), stamp

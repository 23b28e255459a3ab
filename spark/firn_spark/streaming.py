"""``spark.readStream.format("firn")``: offsets, their admission, and the ranges of a micro-batch.

Offsets, in Spark's checkpoint: ``{"topic_id": 4096, "offsets": {"0": 17}, "since": {"0": 3}}``. ``since`` is there for
the compacted view alone: the least horizon that the stream has met (``firn.client.cursor``), by which a broker can tell
that the stream has missed a tombstone. A broker's horizon only grows, but a new master's may lie below that of the one
before: then the stream meets records again that were superseded there, and has to meet their tombstones.

A micro-batch of the raw view is the records between two offsets, the same whenever it is repeated. Of the compacted
view a repeated one may lack rows that were superseded meanwhile; a later one has the newer ones.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)

from firn.errors import InvariantBroken, OffsetExpired, SnapshotExpired
from firn_spark.fetch import Link, Range, read
from firn_spark.options import EARLIEST, ReadOptions
from firn_spark.planning import Bounds, bounds_of, check_partitions, resolved


@dataclass
class StreamTask(InputPartition):
    """What one task of a micro-batch reads."""

    range: Range


@dataclass(frozen=True, slots=True)
class Offsets:
    """Where a stream is; ``since`` is empty for the raw view."""

    topic_id: int
    offsets: Mapping[int, int]
    since: Mapping[int, int]

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> "Offsets":
        """Errors: InvariantBroken for what ``document`` never gave."""
        try:
            parts = [{int(p): int(n) for p, n in document[name].items()} for name in ("offsets", "since")]
            return cls(int(document["topic_id"]), *parts)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise InvariantBroken(f"the checkpoint's offsets are none of firn's: {document!r}") from error

    def document(self) -> dict[str, Any]:
        """*Shape*: equal offsets give equal JSON, by which Spark sees that nothing is new."""
        return {
            "topic_id": self.topic_id,
            "offsets": {str(p): self.offsets[p] for p in sorted(self.offsets)},
            "since": {str(p): self.since[p] for p in sorted(self.since)},
        }


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Lives in a process beside the driver as long as the query; pickled to its tasks, which call ``read`` alone."""

    def __init__(self, options: ReadOptions) -> None:
        self._options = options
        self._last: dict[int, int] | None = None  # ends at the start of a query that is to stop there

    def initialOffset(self) -> dict[str, Any]:
        """Errors: UnknownTopic, Unavailable; BadOffset, OffsetExpired for a position that is not there."""
        options = self._options
        topic_id, bounds = self._bounds()
        offsets = {
            p: resolved(options.starting, p, known, EARLIEST, options.topic) for p, known in bounds.items()
        }
        since = {p: known.horizon for p, known in bounds.items()} if options.view == "compacted" else {}
        return Offsets(topic_id, offsets, since).document()

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        """Errors: SnapshotExpired when the topic was made anew, OffsetExpired when retention overtook the stream."""
        before = Offsets.of(start)
        topic_id, bounds = self._bounds()
        _check_topic(self._options.topic, before.topic_id, topic_id)
        for partition, offset in before.offsets.items():
            if offset < (earliest := bounds[partition].earliest):
                raise OffsetExpired(
                    f"{self._options.topic}/{partition}: offset {offset} has expired before this stream read it; the "
                    f"earliest is {earliest}",
                    earliest=earliest,
                )
        since = {p: min(known, bounds[p].horizon) for p, known in before.since.items()}
        ends = {p: known.end for p, known in bounds.items()}
        if self._last is not None:
            ends = {p: min(end, self._last[p]) for p, end in ends.items()}
        ends = {p: max(offset, ends[p]) for p, offset in before.offsets.items()}
        if isinstance(limit, ReadMaxRows):
            ends = admitted(before.offsets, ends, limit.max_rows)
        return Offsets(topic_id, ends, since).document()

    def getDefaultReadLimit(self) -> ReadLimit:
        most = self._options.records_per_trigger
        return ReadAllAvailable() if most is None else ReadMaxRows(most)

    def reportLatestOffset(self) -> dict[str, Any] | None:
        topic_id, bounds = self._bounds()
        return Offsets(topic_id, {p: known.end for p, known in bounds.items()}, {}).document()

    def prepareForTriggerAvailableNow(self) -> None:
        _, bounds = self._bounds()
        self._last = {p: known.end for p, known in bounds.items()}

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        before, behind, options = Offsets.of(start), Offsets.of(end), self._options
        _check_topic(options.topic, before.topic_id, behind.topic_id)
        return [
            StreamTask(
                Range(
                    topic=options.topic, topic_id=before.topic_id, partition=partition, start=offset,
                    end=behind.offsets[partition], view=options.view, projection=options.projection,
                    since=before.since.get(partition), read_from=options.read_from,
                )
            )
            for partition, offset in before.offsets.items()
            if offset < behind.offsets[partition]
        ]  # fmt: skip

    def read(self, partition: InputPartition) -> Iterator[Any]:
        """Errors: those of ``fetch.read``."""
        assert isinstance(partition, StreamTask), "the others of this reader"
        return read(self._options.connection, [partition.range])

    def _bounds(self) -> tuple[int, dict[int, Bounds]]:
        """The topic's id, and what its partitions hold."""
        options = self._options
        with Link(options.connection) as link:
            target = link.run(link.target(options.topic))
            check_partitions(options, target.partitions)
            return target.topic_id, link.run(
                bounds_of(target, options.topic, range(target.partitions), view=options.view)
            )


def _check_topic(topic: str, known: int, found: int) -> None:
    if known != found:
        raise SnapshotExpired(
            f"topic {topic} was deleted and created anew: this stream's offsets are of the one before; begin with a new "
            "checkpoint",
            topic_id=found,
        )


def admitted(starts: Mapping[int, int], ends: Mapping[int, int], most: int) -> dict[int, int]:
    """Ends of at most ``most`` offsets in all, at least one: every partition gets a share of what it is behind."""
    behind = {p: ends[p] - start for p, start in starts.items()}
    total = sum(behind.values())
    if total <= most:
        return dict(ends)
    found, left = {}, most
    for partition, start in starts.items():
        share = min(behind[partition] * most // total, left)
        found[partition] = start + share
        left -= share
    for partition, end in ends.items():  # what rounding has left
        more = min(left, end - found[partition])
        found[partition] += more
        left -= more
    return found

"""``python -m firn_spark.copy SOURCE TARGET --checkpoint FOLDER``: a topic into another one, while it is written to.

The way to change a topic's number of partitions, its keys, or what its values hold. First the map of SOURCE as of one
pinned snapshot is written to TARGET, then the changes since, from the raw view, until a person says that the target
takes over: by ``--cut-over``, or by a file ``CUT-OVER`` in the checkpoint's folder. Stop the writers of SOURCE before:
the copy then ends when it has everything, and fails when something was written to SOURCE after all.

May be stopped and started again at any time, with the same arguments (``jobs.copystate``); one that a signal stops before
the cut-over does not end with 0. A record may be written to
TARGET twice; the last one of a key is the right one. Rows of a key stay in their order, because all of them are in one
partition of SOURCE, which one task reads. A ``--key`` that makes one key of several gives these no order.
"""

import json
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from firn.errors import Invalid, Unavailable, UnknownTopic
from firn_spark.__main__ import run_by_name
from firn_spark.connection import Connection
from firn_spark.jobs import command, sql, topics
from firn_spark.jobs.copystate import CHANGES, CUT_OVER, CopyState, Lag, committed, covers, only_run
from firn_spark.jobs.livemap import live_frame
from firn_spark.jobs.pins import pinned
from firn_spark.jobs.report import Report

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

LOOK_S = 0.2  # how often the source's ends and the query are looked at: a fifth of what counts as in step
SAY_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What is to be copied; ``key`` and ``value`` are SQL over a record's columns."""

    source: str
    target: str
    checkpoint: Path
    partitions: int | None = None
    key: str = "key"
    value: str = "value"
    append: bool = False
    cut_over: bool = False
    in_step_s: float = 1.0  # a lag below it is told as being in step


@dataclass(frozen=True, slots=True)
class Copied:
    """How a run ended. ``lag`` in seconds, None before the first changes were copied."""

    wish: Wish
    is_cut_over: bool
    map_records: int | None  # None: an earlier run had written the map
    copied: dict[int, int]  # the source's offsets below which everything is in the target
    lag: float | None


def copy(
    spark: "SparkSession",
    connection: Connection,
    wish: Wish,
    *,
    is_stopped: Callable[[], bool] = lambda: False,
    say: Callable[[str], None] = lambda line: None,
) -> Copied:
    """Copy until the cut-over, or until ``is_stopped``: the same call again goes on.

    Errors: Invalid for a checkpoint of another copy, a target that is not empty, a key that is null, a source that is
    still written to at the cut-over; UnknownTopic for a source that was deleted and made anew; OffsetExpired when
    retention went past what was not copied yet. After the last two begin anew, with an empty target and another
    checkpoint.
    """
    with only_run(wish.checkpoint), connection.client() as client:
        state = _begun(client, wish)
        if state.phase == "done":
            raise Invalid(f"{wish.checkpoint}: {wish.source} was cut over to {wish.target} already")
        records = None
        if state.phase == "map":
            state, records = _write_map(spark, connection, wish, state)
            say(f"the map of {wish.source} is in {wish.target}: {records:,} records; now the changes since")
        following = Following(connection, wish, state, say)
        following.start(spark)
        try:
            is_cut_over = following.run(lambda: _ends(client, state), is_stopped)
        finally:
            following.stop()
        if is_cut_over:
            last = _ends(client, state)
            if not covers(following.copied, last):
                behind = sum(end - following.copied.get(partition, 0) for partition, end in last.items())
                raise Invalid(
                    f"{wish.source} is still written to: {behind:,} records came after the cut; stop its writers, then say "
                    "cut over again"
                )
            replace(state, phase="done").write(wish.checkpoint)
    return Copied(wish, is_cut_over, records, following.copied, following.lag)


def _ends(client: Any, state: CopyState) -> topics.Offsets:
    """The ends of the source that is copied. Errors: UnknownTopic: another topic has its name, whose ends say nothing;
    Unavailable: not all are told of.
    """
    described = client.describe(state.source)
    _check_same_source(int(described["topic_id"]), state)
    return topics.latest(described)


def _check_same_source(topic_id: int, state: CopyState) -> None:
    if topic_id != state.source_id:
        raise UnknownTopic(
            f"{state.source} was deleted and made anew while it was copied; begin anew, with an empty target and another "
            "checkpoint"
        )


def _begun(client: Any, wish: Wish) -> CopyState:
    """The state of this copy, new or as it was left. Effects: the target is there."""
    if wish.source == wish.target:
        raise Invalid(f"{wish.source}: source and target must be two topics")
    source = client.describe(wish.source)
    left = CopyState.read(wish.checkpoint)
    target = topics.ready_target(
        client,
        wish.target,
        partitions=wish.partitions,
        may_append=wish.append or left is not None,
        spec=source["spec"],
    )
    asked = CopyState(
        source=wish.source, source_id=int(source["topic_id"]), target=wish.target,
        target_id=int(target["topic_id"]), key=wish.key, value=wish.value, ends={},
    )  # fmt: skip
    if left is None:
        return asked
    left.check_same(asked, wish.checkpoint)
    return left


def _write_map(
    spark: "SparkSession", connection: Connection, wish: Wish, state: CopyState
) -> tuple[CopyState, int]:
    with pinned(connection, wish.source) as pin:
        _check_same_source(pin.topic_id, state)
        # Before anything is kept: it may be no SQL.
        frame = _changed(live_frame(spark, connection, pin.ranges()), wish)
        if not state.ends:
            state = replace(state, ends=dict(pin.ends)).write(wish.checkpoint)
        with connection.client() as client:
            before = sum(topics.latest(client.describe(wish.target)).values())
            _save(frame, connection, wish)
            after = sum(topics.latest(client.describe(wish.target)).values())
    return replace(state, phase="changes").write(wish.checkpoint), after - before


def _save(frame: "DataFrame", connection: Connection, wish: Wish) -> None:
    frame.write.format("firn").options(**connection.options(), topic=wish.target).mode("append").save()


def _changed(frame: "DataFrame", wish: Wish) -> "DataFrame":
    """The rows as the target gets them. Errors: Invalid for SQL that is none."""
    from pyspark.sql import functions as F

    where = F.concat(F.lit(f"{wish.source}, partition "), "partition", F.lit(", offset "), "offset")
    why = F.concat(F.lit("firn.errors.Invalid: "), where, F.lit(f": --key {wish.key} gives null; it must follow from the "
                   "key alone, because a tombstone has no value"))  # fmt: skip
    with sql.given_as(f"--key {wish.key!r} or --value {wish.value!r}"):
        return frame.select(
            F.coalesce(F.expr(wish.key), F.raise_error(why)).alias("key"),
            # A tombstone stays one, whatever is made of values.
            F.when(F.col("value").isNotNull(), F.expr(wish.value)).alias("value"), "timestamp", "tag", "headers",
        )  # fmt: skip


class Following:
    """The changes: a streaming query, and how far it has come."""

    def __init__(
        self, connection: Connection, wish: Wish, state: CopyState, say: Callable[[str], None]
    ) -> None:
        self._connection = connection
        self._wish = wish
        self._state = state
        self._say = say
        self._query: StreamingQuery | None = None
        self._behind = Lag()
        self.copied = dict(state.ends)
        self.lag: float | None = None

    def start(self, spark: "SparkSession") -> None:
        wish, options = self._wish, self._connection.options()
        changes = (
            spark.readStream.format("firn").options(**options, topic=wish.source, view="raw")
            .option("startingOffsets", _json(self._state.ends)).load()
        )  # fmt: skip
        # The place is the state's: Spark's checkpoint has none before its first batch.
        self._query = (
            _changed(changes, wish).writeStream.format("firn").options(**options, topic=wish.target)
            .option("checkpointLocation", str(wish.checkpoint / CHANGES)).outputMode("append")
            .trigger(processingTime="0 seconds").start()
        )  # fmt: skip

    def run(self, ends: Callable[[], topics.Offsets], is_stopped: Callable[[], bool]) -> bool:
        """Follow until the cut-over (True) or ``is_stopped``. Errors: those of the query."""
        assert self._query is not None, "started"
        target: topics.Offsets | None = None
        said, was_in_step = time.monotonic(), False
        while not is_stopped():
            now = time.monotonic()
            with suppress(Unavailable):  # a master changes; one that is gone for good ends the query
                self._behind.saw(now, ends())
            self._look()
            self.lag = self._behind.behind(time.monotonic(), self.copied)
            in_step = self.lag < self._wish.in_step_s
            if in_step and not was_in_step:
                self._say(
                    f"in step: {self.lag:.1f} s behind; to end, stop the writers of {self._wish.source} and make the file "
                    f"{self._wish.checkpoint / CUT_OVER}"
                )
            elif now - said > SAY_S:
                self._say(f"{self.lag:.1f} s behind" if self.lag < float("inf") else "catching up")
                said = now
            was_in_step = in_step
            if target is None and (self._wish.cut_over or (self._wish.checkpoint / CUT_OVER).exists()):
                with suppress(Unavailable):
                    target = ends()
            if target is not None and covers(self.copied, target):
                return True
            if not self._query.isActive:
                raise self._query.exception() or Unavailable(
                    f"the changes of {self._wish.source} are no longer copied"
                )
            time.sleep(LOOK_S)
        return False

    def _look(self) -> None:
        """Take in what Spark's checkpoint says is done. A query that has nothing to do tells no progress."""
        for partition, offset in committed(self._wish.checkpoint / CHANGES).items():
            self.copied[partition] = max(offset, self.copied.get(partition, 0))

    def stop(self) -> None:
        if self._query is not None:
            self._query.stop()


def _json(offsets: topics.Offsets) -> str:
    return json.dumps({str(partition): offset for partition, offset in sorted(offsets.items())})


def report_of(copied: Copied, ended_by: int | None = None) -> Report:
    """As a table and as JSON. ``ended_by``: the signal that stopped it."""
    wish = copied.wish
    document: dict[str, Any] = {
        "job": "copy", "source": wish.source, "target": wish.target, "cut_over": copied.is_cut_over,
        "map_records": copied.map_records, "lag_seconds": copied.lag,
        "partitions": [{"partition": p, "copied": offset} for p, offset in sorted(copied.copied.items())],
    }  # fmt: skip
    if copied.is_cut_over:
        told = f"cut over: {wish.target} has everything that was written to {wish.source}"
    else:
        told = f"stopped; the same command goes on from {wish.checkpoint}"
    columns = [("PARTITION", "r"), ("COPIED BELOW OFFSET", "r")]
    code = 0 if copied.is_cut_over or ended_by is None else 128 + ended_by
    return Report(document, columns, sorted(copied.copied.items()), [told], code=code)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; its exit code."""
    made = command.parser("copy", "Copy a topic into another one while it is written to, until a cut-over.")
    made.add_argument("source", type=command.topic_name)
    made.add_argument("target", type=command.topic_name)
    made.add_argument(
        "--checkpoint", required=True, type=Path, metavar="FOLDER", help="where the copy remembers itself"
    )
    made.add_argument(
        "--partitions",
        type=command.count,
        metavar="N",
        help="make the target with so many, if it is not there",
    )
    made.add_argument(
        "--key", default="key", metavar="SQL", help="of columns key, tag, headers, ...; its key as it is"
    )
    made.add_argument(
        "--value", default="value", metavar="SQL", help="null deletes the key; the value as it is"
    )
    made.add_argument("--append", action="store_true", help="also into a topic that is not empty")
    made.add_argument(
        "--cut-over", action="store_true", help="end when all is copied; the writers have been stopped"
    )

    def work(job: command.Job) -> Report:
        asked = job.asked
        wish = Wish(
            source=asked.source, target=asked.target, checkpoint=asked.checkpoint, partitions=asked.partitions,
            key=asked.key, value=asked.value, append=asked.append, cut_over=asked.cut_over,
        )  # fmt: skip
        signals: list[int] = []
        before = {
            number: signal.signal(number, lambda number, _: signals.append(number))
            for number in (signal.SIGTERM, signal.SIGINT)
        }
        try:
            copied = copy(job.spark, job.connection, wish, is_stopped=lambda: bool(signals), say=command.say)
            return report_of(copied, ended_by=signals[0] if signals else None)
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    return command.run(made, work, arguments, topic="source")


if __name__ == "__main__":
    sys.exit(run_by_name("copy"))

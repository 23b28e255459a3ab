"""``df.write.format("firn")`` and ``df.writeStream.format("firn")``: what a task of each does, and what the driver is told.

Rows are appended as they come; there is nothing to commit or to take back. An attempt that fails leaves what it wrote,
and the next one writes all of it again: at least once in the raw view, once in the compacted. Rows of one key in
different tasks have no order (``docs/spark.md`` says how to give them one).
"""

import logging
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from firn.client.chunks import codecs
from firn.errors import Invalid, InvariantBroken
from firn_spark.cutting import check_columns, parts
from firn_spark.fetch import Link
from firn_spark.options import WriteOptions
from firn_spark.sender import Sender, Writer, producer_id_of

log = logging.getLogger(__name__)

QUERY_ID = "sql.streaming.queryId"  # what Spark tells the tasks of a stream
MICRO_BATCH = "streaming.sql.batchId"


@dataclass
class Written(WriterCommitMessage):
    """What a task wrote. ``ends``: of each partition the offset behind its last record."""

    records: int = 0
    ends: dict[int, int] = field(default_factory=dict)


Message = WriterCommitMessage | None


@dataclass(frozen=True)
class BatchWriter(DataSourceArrowWriter):
    options: WriteOptions
    run: str

    @classmethod
    def of(cls, options: WriteOptions, schema: StructType, *, overwrite: bool) -> "BatchWriter":
        """Errors: Invalid."""
        _check(schema, overwrite)
        return cls(options, uuid.uuid4().hex)

    def write(self, iterator: Iterator[Any]) -> Written:
        """Errors: Invalid, LimitExceeded for a row; Fenced when another attempt writes; what the broker answers."""
        task = _task()
        writer = Writer(producer_id_of(self.run, task.partitionId()), task.taskAttemptId() % (1 << 32))
        return _written(self.options, writer, iterator)

    def commit(self, messages: Sequence[Message]) -> None:
        log.info("%s: %d records were written", self.options.topic, _records(messages))

    def abort(self, messages: Sequence[Message]) -> None:
        log.warning(
            "%s: a write failed; at least %d records of it stay", self.options.topic, _records(messages)
        )


@dataclass(frozen=True)
class StreamWriter(DataSourceStreamArrowWriter):
    options: WriteOptions

    @classmethod
    def of(cls, options: WriteOptions, schema: StructType, *, overwrite: bool) -> "StreamWriter":
        """Errors: Invalid."""
        _check(schema, overwrite)
        return cls(options)

    def write(self, iterator: Iterator[Any]) -> Written:
        """Errors: as those of a batch; Fenced also for a task of a micro-batch that was overtaken."""
        task = _task()
        query, number = task.getLocalProperty(QUERY_ID), task.getLocalProperty(MICRO_BATCH)
        if query is None or number is None:
            raise InvariantBroken(f"Spark does not tell this task {QUERY_ID} and {MICRO_BATCH}")
        run = f"{query}/{self.options.topic}"
        writer = Writer(producer_id_of(run, task.partitionId()), task.attemptNumber(), int(number))
        return _written(self.options, writer, iterator)

    def commit(self, messages: Sequence[Message], batchId: int) -> None:
        log.info(
            "%s: micro-batch %d: %d records were written", self.options.topic, batchId, _records(messages)
        )

    def abort(self, messages: Sequence[Message], batchId: int) -> None:
        log.warning("%s: micro-batch %d failed; it will be written again", self.options.topic, batchId)


def _check(schema: StructType, overwrite: bool) -> None:
    if overwrite:
        raise Invalid(
            'a topic cannot be overwritten: write with .mode("append"), or delete it and create it anew'
        )
    check_columns(schema)


def _task() -> TaskContext:
    found = TaskContext.get()
    if found is None:
        raise InvariantBroken("a writer was called outside of a task")
    return found


def _written(options: WriteOptions, writer: Writer, batches: Iterator[Any]) -> Written:
    with Link(options.connection) as link:
        target = link.run(link.target(options.topic))
        sender = Sender(link, target, writer, codecs(options.compression))
        for batch in batches:
            now_ms = time.time_ns() // 1_000_000
            sender.send(parts(batch, target.partitions, batch_bytes=options.batch_bytes, now_ms=now_ms))
        sender.finish()
        return Written(sender.records, dict(sender.ends))


def _records(messages: Sequence[Message]) -> int:
    return sum(message.records for message in messages if isinstance(message, Written))

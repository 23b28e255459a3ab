"""``spark.read.format("firn")`` and its siblings: Spark's Python Data Source, by the parts beside this module.

Spark makes a ``FirnSource`` in a short-lived process beside the driver, asks it for a reader, plans with that and pickles
it to every task: nothing here holds a socket or a lock.

``pushFilters`` is a method of a class of its own: Spark refuses a reader that has it while filter push-down is off, which
is Spark's default, and calls it only in the one worker module that is made for it. So that is where the reader with it
is made.
"""

import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from pyspark.sql.datasource import (
    DataSource,
    DataSourceArrowWriter,
    DataSourceReader,
    DataSourceStreamArrowWriter,
    DataSourceStreamReader,
    Filter,
    InputPartition,
)
from pyspark.sql.types import StructType

from firn.errors import Invalid
from firn_spark.columns import Projection
from firn_spark.connection import Connection
from firn_spark.fetch import Range, read
from firn_spark.filters import Wanted, wanted_of
from firn_spark.keeper import hand_over
from firn_spark.lookup import KEYS_MAX, looked_up, record_batches
from firn_spark.options import EARLIEST, LATEST, ReadOptions, read_options, stream_options, write_options
from firn_spark.planning import plan
from firn_spark.schema import spark_schema
from firn_spark.streaming import StreamReader
from firn_spark.writer import BatchWriter, StreamWriter

_PUSHDOWN_WORKER = "pyspark.sql.worker.data_source_pushdown_filters"


class FirnSource(DataSource):
    """See ``docs/spark.md`` for the options."""

    @classmethod
    def name(cls) -> str:
        return "firn"

    def schema(self) -> StructType:
        """Errors: Invalid for a projection that is none."""
        return spark_schema(_projection_of(self.options.get("projection")))

    def reader(self, schema: StructType) -> DataSourceReader:
        """Errors: Invalid, naming the option; for a schema of the user's own."""
        options = read_options(self.options)
        _check_schema(schema, options.projection)
        return PushingReader(options) if _PUSHDOWN_WORKER in sys.modules else BatchReader(options)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        """Errors: as ``reader``."""
        options = stream_options(self.options)
        _check_schema(schema, options.projection)
        return StreamReader(options)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceArrowWriter:
        """Errors: Invalid, naming the option or the column."""
        return BatchWriter.of(write_options(self.options), schema, overwrite=overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamArrowWriter:
        """Errors: Invalid, naming the option or the column."""
        return StreamWriter.of(write_options(self.options), schema, overwrite=overwrite)


def _projection_of(text: str | None) -> Projection:
    return "keys" if text is not None and text.lower() == "keys" else "records"


def _check_schema(schema: StructType, projection: Projection) -> None:
    expected = spark_schema(projection)
    if schema != expected:
        raise Invalid(
            f"a topic's schema is given: leave .schema() out, and select from {expected.simpleString()}"
        )


@dataclass
class Task(InputPartition):
    """What one task reads, in this order."""

    ranges: tuple[Range, ...]


@dataclass
class Rows(InputPartition):
    """Rows that were found when the query was planned, as an Arrow stream."""

    stream: bytes


class BatchReader(DataSourceReader):
    def __init__(self, options: ReadOptions) -> None:
        self._options = options
        self._wanted = Wanted()

    def partitions(self) -> Sequence[InputPartition]:
        """Errors: those of ``planning.plan``."""
        options = self._options
        if (rows := self._looked_up()) is not None:
            return [Rows(rows)]
        planned = plan(options, self._wanted)
        if planned.lease is not None:
            hand_over(planned.lease)
        return [Task(ranges) for ranges in planned.tasks]

    def _looked_up(self) -> bytes | None:
        options, keys = self._options, self._wanted.keys
        is_whole = options.starting == EARLIEST and options.ending == LATEST and options.snapshot is None
        if keys is None or len(keys) > KEYS_MAX or options.view == "raw" or not is_whole:
            return None
        return looked_up(options.connection, options.topic, keys, options.projection)

    def read(self, partition: InputPartition) -> Iterator[Any]:
        """Errors: those of ``fetch.read``."""
        if isinstance(partition, Rows):
            return iter(record_batches(partition.stream))
        if isinstance(partition, Task):
            return _read(self._options.connection, partition.ranges, self._wanted)
        return iter(())  # Spark's own, for a plan of no tasks


class PushingReader(BatchReader):
    """A reader that is told the query's conditions."""

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:
        """All of them: Spark looks at what is left as well."""
        self._wanted = wanted_of(filters)
        return filters


def _read(connection: Connection, ranges: tuple[Range, ...], wanted: Wanted) -> Iterator[Any]:
    found = read(connection, ranges)
    return found if wanted.is_all else (wanted.rows_of(batch) for batch in found)

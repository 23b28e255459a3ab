"""Work that a job gives to executors: one task an item, rows as Arrow batches back."""

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from pyarrow import RecordBatch
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

T = TypeVar("T")


def each(
    spark: "SparkSession",
    items: Sequence[T],
    work: "Callable[[T], Iterator[RecordBatch]]",
    schema: "str | StructType",
) -> "DataFrame":
    """What ``work`` yields for each item, in a task of its own. ``work`` travels to the executors by pickle.

    ``schema``: Spark's words for the columns that it yields. Neither RDDs nor the JVM are touched, so that this runs
    on Spark Connect too.
    """
    if not items:
        return spark.createDataFrame([], schema)

    def of_task(batches: "Iterator[RecordBatch]") -> "Iterator[RecordBatch]":
        for batch in batches:
            for number in batch.column(0).to_pylist():
                yield from work(items[number])

    return spark.range(0, len(items), 1, len(items)).mapInArrow(of_task, schema)


def rows(schema: Any, found: Sequence[Sequence[Any]]) -> "RecordBatch":
    """A few rows as a batch; ``schema``: pyarrow's."""
    import pyarrow as pa

    columns = list(zip(*found, strict=True)) if found else [()] * len(schema)
    return pa.RecordBatch.from_arrays(
        [pa.array(list(column), field.type) for column, field in zip(columns, schema, strict=True)],
        schema=schema,
    )

"""The schemas of ``columns`` as Spark has them."""

from functools import cache

from pyspark.sql.types import (
    BinaryType,
    BooleanType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from firn_spark.columns import Projection


@cache
def spark_schema(projection: Projection) -> StructType:
    """The schema of a read."""
    payload = StructField("value", BinaryType())
    if projection == "keys":
        payload = StructField("tombstone", BooleanType(), nullable=False)
    return StructType(
        [
            StructField("topic", StringType(), nullable=False),
            StructField("partition", IntegerType(), nullable=False),
            StructField("offset", LongType(), nullable=False),
            StructField("timestamp", TimestampType(), nullable=False),
            StructField("key", BinaryType(), nullable=False),
            payload,
            StructField("tag", StringType()),
            StructField("headers", MapType(StringType(), StringType())),
        ]
    )

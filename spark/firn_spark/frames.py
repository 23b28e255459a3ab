"""What is done with the rows of a read again and again."""

from pyspark.sql import DataFrame
from pyspark.sql import functions as F


def latest(frame: DataFrame) -> DataFrame:
    """Of rows of a read the newest one of every key, unless that is a tombstone: the map that a topic is.

    *Shape*: the columns of ``frame``, which has ``partition``, ``offset``, ``key`` and ``value`` (or ``tombstone``).
    Keys are told apart by partition too: offsets of different ones have no order.
    """
    deleted = F.col("tombstone") if "tombstone" in frame.columns else F.col("value").isNull()
    newest = F.max_by(F.struct(*frame.columns), "offset").alias("row")
    return frame.groupBy("partition", "key").agg(newest).select("row.*").where(~deleted)

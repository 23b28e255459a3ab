"""Keys counted inside the tasks are those that a dictionary of the client's records has."""

import pytest
from pyspark.sql import SparkSession
from spark_kit import map_of, records_of, written

from firn.client.blocking import Client
from firn_spark.connection import Connection
from firn_spark.counting import KeyCount, count_keys


@pytest.mark.parametrize("slice_records", [400, 1 << 20])
def test_keys_are_counted_by_their_bytes_in_any_number_of_slices(
    spark: SparkSession, connection: Connection, client: Client, topic: str, slice_records: int
) -> None:
    written(client, topic, 41, records=2000)
    client.put(topic, b"", None)  # a key of no byte, deleted
    client.put(topic, bytes(65_536), b"of the longest key")
    rows = records_of(client, topic)
    assert count_keys(spark, connection, topic, slice_records=slice_records) == KeyCount(
        len(rows), len({(row[0], row[3]) for row in rows}), len(map_of(rows))
    )


def test_a_topic_without_a_record_has_no_key_and_one_of_tombstones_none_that_lives(
    spark: SparkSession, connection: Connection, client: Client, topic: str
) -> None:
    client.create_topic(topic, partitions=2)
    assert count_keys(spark, connection, topic) == KeyCount(0, 0, 0)
    for key in (b"a", b"b", b"a"):
        client.delete(topic, key)
    assert count_keys(spark, connection, topic) == KeyCount(3, 2, 0)

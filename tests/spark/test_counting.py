"""Keys counted inside the tasks are those that a dictionary of the client's records has."""

import pytest
from pyspark.sql import SparkSession
from spark_kit import map_of, records_of, written

from firn.client.blocking import Client
from firn_spark.connection import Connection
from firn_spark.counting import KeyCount, count_keys, sliced
from firn_spark.fetch import Range


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


def test_a_partition_is_cut_by_its_rows_and_not_by_the_offsets_that_were_ever_given() -> None:
    """Every task reads the whole partition: two thousand of them would read a compacted one as often."""

    def part(number: int, end: int) -> Range:
        return Range(topic="t", topic_id=1, partition=number, start=0, end=end)

    old, silent, none, deleted = part(0, 10**10), part(1, 12), part(2, 0), part(3, 10**10)
    assert sliced([old, silent, none, deleted], {0: 7, 3: 0}, 5) == [
        (old, 0, 2), (old, 1, 2), (silent, 0, 3), (silent, 1, 3), (silent, 2, 3), (deleted, 0, 1),
    ]  # fmt: skip

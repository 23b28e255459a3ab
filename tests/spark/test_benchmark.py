"""The benchmark's own reads and compaction, on a small topic: quick runs of the harness leave them out."""

import importlib.util
from pathlib import Path

from pyspark.sql import SparkSession

import firn_spark
from firn.client.blocking import Client
from firn_node.demo.process import BrokerProcess

SCRIPT = Path(firn_spark.__file__).parents[2] / "benchmarks" / "spark_client.py"


def test_every_way_that_is_measured_has_all_records(
    client: Client, broker: BrokerProcess, spark: SparkSession, topic: str
) -> None:
    client.create_topic(topic, partitions=2, compaction={"minDirtyRatio": 1.0})
    with client.producer(topic) as producer:
        producer.send_many([b"k%d" % n for n in range(500)], [b"v"] * 500).result()
    spec = importlib.util.spec_from_file_location("spark_client", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    found = script.rates(spark, broker.address, topic, 500)
    assert script.compaction_rate(spark, broker.address, topic, 500) > 0
    assert set(found) == {"count", "columns", "keys_count", "keys_in_tasks"}

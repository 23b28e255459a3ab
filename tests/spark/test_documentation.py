"""The examples of ``docs/spark.md``, run one after another as a notebook's user would."""

import re
from pathlib import Path

from pyspark.sql import SparkSession

import firn_spark
from firn.client.blocking import Client
from firn_node.demo.process import BrokerProcess

PAGE = Path(firn_spark.__file__).parents[2] / "docs" / "spark.md"
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def test_the_examples_of_the_documentation_run_as_they_stand(
    client: Client, broker: BrokerProcess, spark: SparkSession
) -> None:
    for name in ("flights", "flights-copy"):
        client.create_topic(name, partitions=2)
    with client.producer("flights") as producer:
        for n in range(300):
            producer.send(b"N%d" % (14000 + n % 240), b"EWR-IAH" if n % 50 else None)
    blocks = BLOCK.findall(PAGE.read_text())
    assert len(blocks) >= 9
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block.replace("127.0.0.1:7700", broker.address), str(PAGE), "exec"), names)
    assert spark.table("counted").agg({"count": "sum"}).first() == (300,)
    copied = client.get("flights-copy", b"N14228")
    assert copied is not None
    assert copied.value == b"EWR-SFO"

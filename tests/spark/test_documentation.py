"""The examples of the pages on Spark, run one after another as a notebook's user would."""

import re
from pathlib import Path

from pyspark.sql import SparkSession

import firn_spark
from firn.client.blocking import Client
from firn_node.demo.process import BrokerProcess

DOCS = Path(firn_spark.__file__).parents[2] / "docs"
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def test_the_examples_of_the_documentation_run_as_they_stand(
    client: Client, broker: BrokerProcess, spark: SparkSession, tmp_path: Path
) -> None:
    for name in ("flights", "flights-copy"):
        client.create_topic(name, partitions=2)
    with client.producer("flights") as producer:
        for n in range(300):
            producer.send(b"N%d" % (14000 + n % 240), b"EWR-IAH" if n % 50 else None)
    for name, blocks_min in (("spark.md", 9), ("spark-jobs.md", 1)):
        page = (DOCS / name).read_text()
        here = page.replace("127.0.0.1:7700", broker.address).replace("/data/", f"{tmp_path}/")
        blocks = BLOCK.findall(here)
        assert len(blocks) >= blocks_min
        names: dict[str, object] = {}
        for block in blocks:
            exec(compile(block, str(DOCS / name), "exec"), names)
    assert spark.read.parquet(str(tmp_path / "flights")).count() > 200
    assert spark.table("counted").agg({"count": "sum"}).first() == (300,)
    copied = client.get("flights-copy", b"N14228")
    assert copied is not None
    assert copied.value == b"EWR-SFO"

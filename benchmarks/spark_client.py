"""Reading a topic by Spark: measured in a session that has done such work before, so that no start is in it."""

import sys
import time
from collections.abc import Callable
from typing import Any

CORES = 2


def read(address: str, topic: str, records: int, cores: int = CORES) -> dict[str, float]:
    """Records/s of each way to read a topic, in a session of its own.

    Errors: RuntimeError when a read does not have all records.
    """
    from firn_spark.session import session

    spark = session(
        "firn-bench",
        master=f"local[{cores}]",
        conf={"spark.ui.enabled": "false", "spark.driver.memory": "2g"},
    )
    try:
        return rates(spark, address, topic, records)
    finally:
        spark.stop()


def compact(address: str, topic: str, records: int, cores: int = CORES) -> dict[str, float]:
    """Records/s of a forced compaction of a whole topic, by a driver that may take 1 GiB."""
    from firn_spark.session import session

    conf = {"spark.ui.enabled": "false", "spark.driver.memory": "1g"}
    spark = session("firn-bench", master=f"local[{cores}]", conf=conf)
    try:
        spark.sparkContext.parallelize(range(cores), cores).map(
            _import
        ).collect()  # workers, and their imports
        return {"rate": compaction_rate(spark, address, topic, records)}
    finally:
        spark.stop()


def compaction_rate(spark: Any, address: str, topic: str, records: int) -> float:
    """Records/s. Errors: RuntimeError when a partition is not done, or when rows were not compared."""
    from firn_spark.connection import Connection
    from firn_spark.force_compaction import compact as compact_by_force

    began = time.perf_counter()
    plan = compact_by_force(spark, Connection(bootstrap=address), topic)
    seconds = time.perf_counter() - began
    compared = sum(row["compared"] for row in plan["partitions"])
    states = {row["state"] for row in plan["partitions"]}
    if compared != records or states != {"done"}:
        raise RuntimeError(f"{topic}: {compared} of {records} records compared, {sorted(states)}")
    return records / seconds


def _import(number: int) -> str:
    import firn_spark.mapping

    return f"{firn_spark.mapping.__name__} {number}"


def rates(spark: Any, address: str, topic: str, records: int) -> dict[str, float]:
    """Records/s of each way to read. Errors: RuntimeError when a read does not have all records."""
    reader = spark.read.format("firn").options(bootstrap=address, view="raw")
    whole, keys = reader.load(topic), reader.option("projection", "keys").load(topic)
    ways: dict[str, Callable[[], int | None]] = {
        "count": whole.count,
        "columns": lambda: _every_column(whole),
        "keys_count": keys.count,
        "keys_in_tasks": lambda: _counted_in_tasks(spark, address, topic),
    }
    found = {}
    for name, way in ways.items():
        way()  # workers, their imports, and what the JVM compiles
        began = time.perf_counter()
        count = way()
        found[name] = records / (time.perf_counter() - began)
        if count is not None and count != records:
            raise RuntimeError(f"{name}: {count} records of {topic}, expected {records}")
    return found


def _every_column(frame: Any) -> None:
    """Spark takes every column of every row, and drops them."""
    frame.write.format("noop").mode("overwrite").save()


def _counted_in_tasks(spark: Any, address: str, topic: str) -> int:
    """Records, by tasks that count them and their keys without handing anything to the JVM."""
    from firn_spark.connection import Connection
    from firn_spark.counting import counted
    from firn_spark.fetch import Range

    connection = Connection(bootstrap=address)
    with connection.client() as client:
        shown = client.describe(topic)
    ranges = [
        Range(
            topic=topic, topic_id=shown["topic_id"], partition=row["partition"], start=0, end=row["latest"], view="raw",
            projection="keys",
        )
        for row in shown["partitions"]
    ]  # fmt: skip
    return counted(spark, connection, ranges).records


if __name__ == "__main__":
    print(read(sys.argv[1], sys.argv[2], int(sys.argv[3])))
